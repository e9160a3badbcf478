"""How torch.distributed comes to know the backend "ccl": when a program first asks for it, or at once.

A backend that is registered changes what torch does for others ("cpu:gloo,…" gets another default), so a launch only
makes torch look again where it meets the name. Source: torch/distributed/distributed_c10d.py, Backend.__new__.
"""

from __future__ import annotations

import sys

from cpulaunch.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

NAME = "ccl"
_C10D = "torch.distributed.distributed_c10d"


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group. Raises: CclError if oneCCL cannot be had."""
    from cpulaunch.worker.ccl.backend import CclGroup

    return CclGroup(store, rank, size, timeout)


def register() -> None:
    """Effect: torch.distributed has a backend "ccl", unless it has one already (Intel's bindings for torch <= 2.8)."""
    from torch.distributed import Backend

    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, make_group, devices=["cpu"])


def offer(settings: TorchSettings) -> str:
    """Effect: torch.distributed gets the backend once a program names it."""
    c10d = sys.modules.get(_C10D)
    if c10d is None:
        return ""  # This torch is built without torch.distributed.
    backend: Any = c10d.Backend
    plain = backend.__new__

    def named(cls: Any, name: Any) -> Any:
        if isinstance(name, str) and NAME in name.lower() and _asked(name):
            backend.__new__ = staticmethod(plain)
            register()
        return plain(cls, name)

    backend.__new__ = staticmethod(named)
    return ""


def _asked(name: str) -> bool:
    """Whether the name is the backend's, alone or for a device ("cpu:ccl,cuda:nccl")."""
    return NAME in (part.rpartition(":")[2] for part in name.lower().split(","))
