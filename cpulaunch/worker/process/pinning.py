"""Whether an OpenMP runtime pins threads: the main thread then has one CPU, and so have the processes it starts."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_UNPINNED = {"", "false", "none", "disabled", "respect", "norespect"}


def pins() -> bool:
    """Whether the environment makes an OpenMP runtime bind threads to CPUs.

    Source: OpenMP 5.2, 21.1.7; GNU libgomp manual; LLVM OpenMP reference (KMP_AFFINITY: modifiers, then a type).
    """
    values = (os.environ.get(name, "") for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
    return any(_UNPINNED.isdisjoint(value.lower().split(",")) for value in values)


def worker_cpus(settings: TorchSettings) -> frozenset[int]:
    """The CPUs that the worker is bound to; empty if it is not bound, or where the system cannot bind."""
    return parse_cpulist(settings.cpus) if hasattr(os, "sched_setaffinity") else frozenset()


def loader_cpus(settings: TorchSettings) -> frozenset[int]:
    """The CPUs reserved for DataLoader workers; those of the worker if none are reserved."""
    if not settings.loader_cpus or not hasattr(os, "sched_setaffinity"):
        return worker_cpus(settings)
    return parse_cpulist(settings.loader_cpus)


def move(cpus: frozenset[int]) -> None:
    """Effect: binds this thread to these CPUs; does nothing if they have gone offline since the plan was made."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)


@contextmanager
def worker_mask(cpus: frozenset[int]) -> Iterator[None]:
    """Effect: a pinned thread has all CPUs of the worker inside the context, and its own mask again afterwards."""
    if not cpus or not pins():
        yield
        return
    own = os.sched_getaffinity(0)
    move(cpus)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)
