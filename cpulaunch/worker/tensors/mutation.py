"""In-place writes: a graph may write to tensors it has created, not to arguments or weights.

A call that is repeated must not write to running statistics twice, nor draw other random numbers.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

STATISTICS_UPDATES = ("batch_norm", "native_batch_norm", "instance_norm")
"""Operations that update running statistics (arguments 3 and 4) if argument 5 is true; their schema does not say so.

Source: pytorch/aten/src/ATen/native/native_functions.yaml.
"""


class WrittenError(Exception):
    """An operation would have written to a tensor that the graph did not create."""


class OwnResultsOnly(TorchDispatchMode):
    """A context in which an operation raises WrittenError instead of writing to the memory of one of `tensors`."""

    supports_higher_order_operators = True

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._foreign = set(map(storage_of, tensors)) - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if isinstance(value, Tensor) and storage_of(value) in self._foreign:
                raise WrittenError(str(func))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    if schema.name.removeprefix("aten::") in STATISTICS_UPDATES:
        return list(args[3:5]) if args[5] else []
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written: list[Any] = []
    for argument in schema.arguments:
        if (alias := argument.alias_info) and alias.is_write and argument.name in values:
            value = values[argument.name]
            written.extend(value if isinstance(value, list | tuple) else [value])
    return written


def storage_of(tensor: Tensor) -> int:
    """The address of the tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # Sparse and other tensors without a storage.
        return 0


def running_statistics(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The running statistics that a call of the module changes, each with a copy of what it is before.

    It goes through the parts by itself: `modules()` takes several times as long, at each call of a model.
    """
    norms = [module] if module.training and isinstance(module, _NormBase) else []
    left, seen = [module], {id(module)}
    with suppress(Exception):  # A class may override what is read here.
        while left:
            for part in left.pop()._modules.values():
                if part is None:
                    continue
                if part._modules and id(part) not in seen:
                    seen.add(id(part))
                    left.append(part)
                if part.training and isinstance(part, _NormBase):
                    norms.append(part)
    buffers = [buffer for norm in norms for buffer in norm._buffers.values() if buffer is not None]
    return [(buffer, buffer.clone()) for buffer in buffers]


def restore(statistics: list[tuple[Tensor, Tensor]]) -> None:
    """Effect: the tensors have their old values again."""
    for buffer, before in statistics:
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(before)


IDLE = ("QueueFeederThread", "TMonitor", "cpulaunch-sampler", "ccl", "ccl watch", "ccl set-up", "gloo set-up")
"""Names, or classes, of threads that draw nothing: multiprocessing's, which any DataLoader with workers has, tqdm's,
which stays after a first bar, and the plugin's own.
"""


def others_may_draw() -> bool:
    """Whether another thread may draw from torch's random number generator, which is that of the process."""
    this = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not this and each.name not in IDLE]
    return any(type(each).__name__ not in IDLE for each in others)


def random_state() -> Tensor | None:
    """The state of torch's random number generator, for restore_random_state; None if other threads may draw."""
    return None if others_may_draw() else torch.get_rng_state()


def restore_random_state(state: Tensor | None) -> None:
    """Effect: torch's random number generator has this state again; not where other threads may have drawn since, which
    would draw the same numbers once more. A thread that has ended since then was there before.
    """
    if state is not None and not torch.equal(torch.get_rng_state(), state) and not others_may_draw():
        torch.set_rng_state(state)
