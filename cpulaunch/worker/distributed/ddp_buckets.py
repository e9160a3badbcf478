"""The size of DistributedDataParallel's buckets, where the program leaves it to torch.

Gradients are reduced in buckets while the backward pass goes on: small ones overlap more with it, large ones cost fewer
collectives. Which is faster depends on the model, the ranks and the backend. Source: torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

import inspect
from functools import wraps

from torch.nn.parallel import DistributedDataParallel

from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ARGUMENT = "bucket_cap_mb"
CHOICES = (ARGUMENT, "bucket_cap_mb_list")
"""Arguments with which a program chooses the sizes itself."""


def install(settings: TorchSettings) -> str:
    """What was done. Effect: new DistributedDataParallel modules have buckets of this size.

    Raises: RuntimeError if this torch has no such argument.
    """
    plain = DistributedDataParallel.__init__
    signature = inspect.signature(plain)
    if ARGUMENT not in signature.parameters:
        raise RuntimeError("this torch chooses the size of buckets itself")
    size = settings.ddp_bucket_mb

    @wraps(plain)
    def with_size(self: Any, *arguments: Any, **named: Any) -> None:
        given = signature.bind_partial(self, *arguments, **named).arguments
        chosen = any(given.get(name) is not None for name in CHOICES)
        if not chosen and (ARGUMENT in named or ARGUMENT not in given):
            named = {**named, ARGUMENT: size}
        plain(self, *arguments, **named)

    DistributedDataParallel.__init__ = with_size
    return f"DDP reduces gradients in buckets of {size} MB"
