"""How torch.distributed comes to know the backend "ccl", and which backend a program gets that names another.

A backend that is registered changes what torch does for others ("cpu:gloo,…" gets another default), so a launch only
makes torch look again where it meets a name. Source: torch/distributed/distributed_c10d.py, Backend.__new__.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib.util import find_spec

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import warned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any

NAME, GLOO, MPI = "ccl", "gloo", "mpi"
AVAILABLE = "is_ccl_available"
DEFAULT = "undefined"
"""What torch calls a backend that nobody named."""
BINDINGS = "oneccl_bindings_for_pytorch"
"""Intel's own backend "ccl", for torch 2.8 and older."""
_C10D = "torch.distributed.distributed_c10d"


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group. Raises: CclError if oneCCL cannot be had."""
    from cpulaunch.worker.ccl.backend import CclGroup

    return CclGroup(store, rank, size, timeout)


def register() -> None:
    """Effect: torch.distributed has a backend "ccl", unless it has one already."""
    from torch.distributed import Backend

    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, make_group, devices=["cpu"])
    announce()


def announce(chosen: str | None = None) -> None:
    """Effect: torch.distributed.is_backend_available("ccl") says whether a program that names ccl gets a group.

    torch asks a function of such a name, if there is one, before it looks at what is registered.
    Source: torch/distributed/distributed_c10d.py, is_backend_available.
    """
    package: Any = sys.modules["torch.distributed"]
    if not hasattr(package, AVAILABLE):
        setattr(package, AVAILABLE, lambda: chosen == GLOO or is_available())


def is_available() -> bool:
    """Whether a group of ccl can be made: Intel's, or this package's."""
    from cpulaunch.worker.ccl import availability

    return find_spec(BINDINGS) is not None or availability.is_available(os.environ)


def register_best(settings: TorchSettings) -> None:
    """Effect: torch.distributed has a backend "ccl": Intel's bindings where they can be imported, else cpulaunch's."""
    backend = sys.modules[_C10D].Backend
    if NAME.upper() not in backend._plugins and find_spec(BINDINGS) is not None:
        try:
            __import__(BINDINGS)
        except (ImportError, OSError, RuntimeError) as error:
            warned(settings, f"{BINDINGS} cannot be imported ({error}), so cpulaunch's own ccl backend is used")
    register()


def offer(settings: TorchSettings) -> str:
    """Effect: torch.distributed gets the backend once a program names it, and says so before."""
    if _C10D in sys.modules:
        announce(settings.dist_backend)
        if settings.dist_backend != GLOO:
            _watch_names(lambda name: _offered(name, settings))
    return ""  # A torch that is built without torch.distributed needs nothing.


def _offered(name: str, settings: TorchSettings) -> str:
    if NAME in _parts(name):
        register_best(settings)
    return name


def choose(settings: TorchSettings) -> str:
    """Effect: what the program asks for runs on the backend chosen. Raises: RuntimeError if torch has it not."""
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        raise RuntimeError("this torch is built without torch.distributed")
    chosen = settings.dist_backend
    if chosen == GLOO:
        _watch_names(lambda name: _renamed(name, NAME, GLOO))
        return "gloo is used where the program selects ccl"
    if chosen == MPI and not c10d.is_mpi_available():
        raise RuntimeError("this torch is built without MPI, so the program's own backend is used")
    _watch_names(lambda name: _by_default(name, settings))
    _watch_init(c10d, settings)
    return f"{chosen} is used where the program selects gloo or no backend"


def _by_default(name: str, settings: TorchSettings) -> str:
    """Effect: torch's own choice for the CPU, which it makes where a program names nothing, is the backend chosen.

    Not beside a GPU: torch keeps one group for all devices, and one that is written in Python has only its own.
    """
    if name == DEFAULT and not _has_gpu():
        if settings.dist_backend == NAME:
            register_best(settings)
        sys.modules[_C10D].Backend.default_device_backend_map["cpu"] = settings.dist_backend
    return name


def _has_gpu() -> bool:
    """Whether torch would choose a backend for a GPU."""
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def _watch_names(seen: Callable[[str], str]) -> None:
    """Effect: every name of a backend that torch meets is what `seen` makes of it."""
    backend: Any = sys.modules[_C10D].Backend
    plain = backend.__new__

    def named(cls: Any, name: Any) -> Any:
        return plain(cls, seen(name.lower()) if isinstance(name, str) else name)

    backend.__new__ = staticmethod(named)


def _watch_init(c10d: Any, settings: TorchSettings) -> None:
    """Effect: init_process_group("gloo") makes a group of the chosen backend; new_group("gloo") still one of gloo.

    Names for several devices stay: see _by_default.
    """
    chosen = settings.dist_backend or GLOO  # The row is applied where one was chosen only.
    package: Any = sys.modules["torch.distributed"]
    plain = c10d.init_process_group

    @wraps(plain)
    def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(backend, str):
            backend = backend if "," in backend else _renamed(backend.lower(), GLOO, chosen)
        else:
            _by_default(DEFAULT, settings)  # Where a device is named, torch looks for its backend at once.
        return plain(backend, *arguments, **named)

    c10d.init_process_group = package.init_process_group = init_process_group


def _parts(name: str) -> list[str]:
    """The backends in a name: one for all ("ccl"), or by device ("cpu:ccl,cuda:nccl")."""
    return [part.rpartition(":")[2] for part in name.split(",")]


def _renamed(name: str, old: str, new: str) -> str:
    """The name with another backend for the CPU, alone or beside other devices."""
    if name == old:
        return new
    return ",".join(f"cpu:{new}" if part == f"cpu:{old}" else part for part in name.split(","))
