"""Registration of the backend "ccl" with torch.distributed, and the replacement of the backend that a program names.

A registered backend changes how torch treats the others ("cpu:gloo,…" gets another default). So a launch registers
ccl only when the program names it. Source: torch/distributed/distributed_c10d.py, Backend.__new__.
"""

import os
import platform
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import warned

NAME, GLOO, MPI = "ccl", "gloo", "mpi"
AVAILABLE = "is_ccl_available"
DEFAULT = "undefined"
"""torch's name for the backend of a program that names none."""
BINDINGS = "oneccl_bindings_for_pytorch"
"""Intel's own backend "ccl", for torch 2.8 and older."""
MACHINE = ("linux", "x86_64")
_C10D = "torch.distributed.distributed_c10d"


def _package() -> Any:
    return sys.modules["torch.distributed"]


def register() -> None:
    """Effect: registers this package's backend "ccl" with torch.distributed, unless one is already registered."""
    from torch.distributed import Backend

    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, _creator(), devices=["cpu"])
        _accept_in_monitored_barrier(sys.modules[_C10D])
        _skip_in_flight_recorder(sys.modules[_C10D])
    announce()


def _creator() -> Any:
    """What creates a group; on a machine that cannot have one, it raises CclError.

    What a group needs is imported now: a rank whose import fails while a group is set up would leave the others
    waiting.
    """
    machine = sys.platform, platform.machine()
    if machine != MACHINE:
        return lambda *_: check_machine(*machine)
    from cpulaunch.worker.ccl.backend import CclGroup
    from cpulaunch.worker.ccl.works.callback_order import watch_callbacks

    watch_callbacks()
    return CclGroup


def _accept_in_monitored_barrier(c10d: Any) -> None:
    """Effect: torch's monitored_barrier, which it has for gloo only, accepts this package's groups too."""
    package, plain = _package(), c10d.monitored_barrier

    @wraps(plain)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        barrier = getattr(group or c10d.GroupMember.WORLD, "barrier_by_gloo", partial(plain, group))
        barrier(timeout, wait_all_ranks)

    c10d.monitored_barrier = package.monitored_barrier = monitored_barrier


def _skip_in_flight_recorder(c10d: Any) -> None:
    """Effect: the flight recorder of torch 2.15 skips this package's groups: it can only record backends in C++."""
    plain = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if plain is not None:
        c10d._maybe_attach_flight_recorder = wraps(plain)(
            lambda group, *more, **named: None if hasattr(group, "barrier_by_gloo") else plain(group, *more, **named)
        )


def announce(chosen: str | None = None) -> None:
    """Effect: torch.distributed.is_backend_available("ccl") returns whether a program that names ccl gets a group.

    torch calls the function `is_NAME_available` if there is one, before it looks at the registered backends.
    `chosen` is the value of --dist-backend. Source: torch/distributed/distributed_c10d.py, is_backend_available.
    """
    if not hasattr(_package(), AVAILABLE):
        setattr(_package(), AVAILABLE, lambda: chosen == GLOO or is_available())


def check_machine(system: str, architecture: str) -> None:
    """Raises: CclError unless this is x86-64 Linux, which oneCCL and the compiled library need."""
    from cpulaunch.worker.ccl.wire.errors import CclError

    if (system, architecture) != MACHINE:
        raise CclError(f"the ccl backend supports x86-64 Linux only, not {architecture} {system}\nhint: use gloo")


def is_available() -> bool:
    """Whether a process group over ccl is available: of Intel's bindings, or of this package over the requested path.

    As far as one process can determine without the others.
    """
    from cpulaunch.worker.ccl.oneccl.library import is_installed

    if find_spec(BINDINGS) is not None or (sys.platform, platform.machine()) != MACHINE:
        return find_spec(BINDINGS) is not None
    return os.environ.get(PATH_VARIABLE) != "oneccl" or is_installed()


def register_best(settings: TorchSettings) -> None:
    """Effect: registers a backend "ccl": Intel's bindings if they can be imported, else this package's."""
    if NAME.upper() not in sys.modules[_C10D].Backend._plugins and find_spec(BINDINGS) is not None:
        try:
            __import__(BINDINGS)
        except (ImportError, OSError, RuntimeError) as error:
            warned(settings, f"{BINDINGS} cannot be imported ({error}), so cpulaunch's own ccl backend is used")
    register()


def offer(settings: TorchSettings) -> str:
    """An empty note. Effect: a program that names ccl gets it; is_backend_available("ccl") is correct before that."""

    def registered(name: str) -> str:
        # A name has one backend for all devices ("ccl") or one for each ("cpu:ccl,cuda:nccl").
        if NAME in [part.rpartition(":")[2] for part in name.split(",")]:
            register_best(settings)
        return name

    if _C10D in sys.modules:
        announce(settings.dist_backend)
        if settings.dist_backend != GLOO:
            _watch_names(registered)
    return ""  # A torch that is built without torch.distributed needs no backend.


def choose(settings: TorchSettings) -> str:
    """A note about the replacement. Effect: groups of the program use the chosen backend instead of the one it names.

    Raises: RuntimeError if torch lacks the chosen backend.
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        raise RuntimeError("this torch is built without torch.distributed")
    chosen = settings.dist_backend
    if chosen == GLOO:
        _watch_names(lambda name: _renamed(name, NAME, GLOO))
        return "gloo is used where the program selects ccl"
    if chosen == MPI and not c10d.is_mpi_available():
        raise RuntimeError("this torch is built without MPI, so the program's own backend is used")
    _watch_names(lambda name: _choose_default(name, settings))
    _watch_init(c10d, settings)
    return f"{chosen} is used where the program selects gloo or no backend"


def _choose_default(name: str, settings: TorchSettings) -> str:
    """The name, unchanged. Effect: if it is torch's default, the chosen backend becomes torch's default for the CPU.

    With a GPU nothing changes: torch creates one group for all devices, and a group written in Python supports only
    the devices of its own backend.
    """
    import torch

    if name == DEFAULT and not (torch.cuda.is_available() or torch.xpu.is_available()):
        if settings.dist_backend == NAME:
            register_best(settings)
        sys.modules[_C10D].Backend.default_device_backend_map["cpu"] = settings.dist_backend
    return name


def _watch_names(replace: Callable[[str], str]) -> None:
    """Effect: passes every backend name that torch processes, in lower case, to `replace` and uses the result."""
    backend: Any = sys.modules[_C10D].Backend
    plain = backend.__new__

    def named(cls: Any, name: Any) -> Any:
        return plain(cls, replace(name.lower()) if isinstance(name, str) else name)

    backend.__new__ = staticmethod(named)


def _watch_init(c10d: Any, settings: TorchSettings) -> None:
    """Effect: init_process_group("gloo") creates a group of the chosen backend; new_group("gloo") still uses gloo.

    Names for several devices do not change: see _choose_default.
    """
    package, plain = _package(), c10d.init_process_group

    @wraps(plain)
    def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(backend, str):
            backend = backend if "," in backend else _renamed(backend.lower(), GLOO, str(settings.dist_backend))
        else:
            _choose_default(DEFAULT, settings)  # If device_id is given, torch reads its default at once.
        return plain(backend, *arguments, **named)

    c10d.init_process_group = package.init_process_group = init_process_group


def _renamed(name: str, old: str, new: str) -> str:
    """The name with `new` instead of `old` as the backend for all devices or for the CPU."""
    if name == old:
        return new
    return ",".join(f"cpu:{new}" if part == f"cpu:{old}" else part for part in name.split(","))
