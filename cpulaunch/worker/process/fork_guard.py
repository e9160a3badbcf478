"""The fork guard: forked children and DataLoader workers get a mask of their own instead of one thread's.

An OpenMP runtime that pins threads leaves the main thread on one CPU, and a child inherits the mask of the thread that
forked it: DataLoader workers then share one CPU and are ten times slower. Source: pytorch issues 99625 and 101850.

Without pinning a forked child keeps what it inherits: that is the worker's mask, or what the program chose.
"""

from __future__ import annotations

import os
from functools import wraps

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process.pinning import loader_cpus, move, pins, worker_cpus, worker_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_loader_cpus: frozenset[int] = frozenset()
_set_apart = False
_torch_loop: Any = None


def install(settings: TorchSettings) -> str:
    """Effect: from now on every forked child of this process, and every DataLoader worker, runs on the plan's CPUs."""
    cpus = worker_cpus(settings)
    if cpus:
        os.register_at_fork(after_in_child=lambda: _restore(cpus))
    _wrap_loader(settings)
    apart = f"; DataLoader workers run on {settings.loader_cpus}" if settings.loader_cpus else ""
    return f"children get the worker's CPUs {settings.cpus}{apart}"


def _restore(cpus: frozenset[int]) -> None:
    """Effect: this thread may run on the worker's CPUs again, if OpenMP pinned it."""
    if pins():
        move(cpus)


def _wrap_loader(settings: TorchSettings) -> None:
    """Raises: AttributeError if a future torch keeps its loader's loop elsewhere."""
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import worker

    global _torch_loop, _loader_cpus, _set_apart
    _loader_cpus, _set_apart = loader_cpus(settings), bool(settings.loader_cpus)
    _torch_loop = worker._worker_loop
    worker._worker_loop = loader_loop
    _let_count(DataLoader, worker_cpus(settings))


def _let_count(loader: Any, cpus: frozenset[int]) -> None:
    """Effect: DataLoader's warning of too many workers counts the worker's CPUs, not a pinned thread's one."""
    plain = loader.check_worker_number_rationality

    @wraps(plain)
    def check(self: Any) -> None:
        with worker_mask(cpus):
            plain(self)

    loader.check_worker_number_rationality = check


def loader_loop(*arguments: Any, **named: Any) -> None:
    """A DataLoader worker on its CPUs. Spawned processes find this function by its name; importing torch fills it in.

    A worker_init_fn of the program that chooses CPUs runs later, and wins.
    """
    import torch.utils.data._utils.worker as torch_worker

    if _loader_cpus and (_set_apart or pins()):
        move(_loader_cpus)
    loop = _torch_loop or torch_worker._worker_loop
    loop(*arguments, **named)
