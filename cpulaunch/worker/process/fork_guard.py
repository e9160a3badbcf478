"""The fork guard: forked children and DataLoader workers get the planned CPUs instead of the forking thread's mask.

An OpenMP runtime that pins threads leaves the main thread on one CPU, and a child inherits the mask of the thread that
forked it: DataLoader workers then share one CPU and are ten times slower. Source: pytorch issues 99625 and 101850.

Without pinning, a forked child keeps the mask it inherits: the worker's, or one that the program has set.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import wraps

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process.pinning import loader_cpus, move, pins, worker_cpus, worker_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_loader_cpus: frozenset[int] = frozenset()
_has_loader_cpus = False
_torch_loop: Any = None


def install(settings: TorchSettings) -> str:
    """Effect: children forked by this process from now on, and all DataLoader workers, run on the planned CPUs."""
    cpus = worker_cpus(settings)
    if cpus:
        os.register_at_fork(after_in_child=lambda: _restore(cpus))
    _wrap_loader(settings)
    loaders = f"; DataLoader workers run on CPUs {settings.loader_cpus}" if settings.loader_cpus else ""
    return f"child processes may use the worker's CPUs {settings.cpus}{loaders}"


def _restore(cpus: frozenset[int]) -> None:
    """Effect: this thread may run on all CPUs of the worker again, if an OpenMP runtime pinned it."""
    if pins():
        move(cpus)


def _wrap_loader(settings: TorchSettings) -> None:
    """Effect: DataLoader workers run `loader_loop`. Raises: AttributeError if a future torch moves its own loop."""
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import worker

    global _torch_loop, _loader_cpus, _has_loader_cpus
    _loader_cpus, _has_loader_cpus = loader_cpus(settings), bool(settings.loader_cpus)
    _torch_loop = worker._worker_loop
    worker._worker_loop = loader_loop
    _count_worker_cpus(DataLoader, worker_cpus(settings))


def _count_worker_cpus(loader: Any, cpus: frozenset[int]) -> None:
    """Effect: DataLoader warns of too many workers only if they are more than it would count without this launch.

    The warning keeps the place that torch gives it, which a function around torch's own would take.
    """
    plain = loader.check_worker_number_rationality

    @wraps(plain)
    def check(self: Any) -> None:
        if self.num_workers and self.num_workers <= _inherited_cpus():
            return
        with warnings.catch_warnings(record=True) as caught, worker_mask(cpus):
            warnings.simplefilter("always")
            plain(self)
        caller = sys._getframe(1)
        for warning in caught:
            warnings.warn_explicit(
                warning.message, warning.category, caller.f_code.co_filename, caller.f_lineno, source=warning.source
            )

    loader.check_worker_number_rationality = check


def _inherited_cpus() -> int:
    """How many CPUs the launcher may use: the shell's or the supervisor's mask, which is not this worker's."""
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):
        return 0


def loader_loop(*arguments: Any, **named: Any) -> None:
    """Effect: moves a DataLoader worker to its CPUs and runs torch's loop in it.

    Spawned processes import this function by name; importing torch there installs the plugin, which sets its globals.
    A worker_init_fn of the program runs later and may choose other CPUs.
    """
    import torch.utils.data._utils.worker as torch_worker

    if _loader_cpus and (_has_loader_cpus or pins()):
        move(_loader_cpus)
    loop = _torch_loop or torch_worker._worker_loop
    loop(*arguments, **named)
