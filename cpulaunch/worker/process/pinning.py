"""Whether OpenMP pins threads here: then the main thread keeps one CPU, and whatever it starts inherits that one."""

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
    """Whether the environment asks an OpenMP runtime to bind threads to CPUs.

    Source: OpenMP 5.2, 21.1.7; GNU libgomp manual; LLVM OpenMP reference (KMP_AFFINITY: modifiers, then a type).
    """
    values = (os.environ.get(name, "") for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
    return any(_UNPINNED.isdisjoint(value.lower().split(",")) for value in values)


def worker_cpus(settings: TorchSettings) -> frozenset[int]:
    """The CPUs that the worker was started on; empty if it is not bound, or where CPUs cannot be chosen."""
    return parse_cpulist(settings.cpus) if hasattr(os, "sched_setaffinity") else frozenset()


def loader_cpus(settings: TorchSettings) -> frozenset[int]:
    """The CPUs for DataLoader workers; the worker's own where none were set apart."""
    if not settings.loader_cpus or not hasattr(os, "sched_setaffinity"):
        return worker_cpus(settings)
    return parse_cpulist(settings.loader_cpus)


def move(cpus: frozenset[int]) -> None:
    """Effect: this thread runs on these CPUs; nothing changes if they have gone away since the plan was made."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)


@contextmanager
def worker_mask(cpus: frozenset[int]) -> Iterator[None]:
    """Effect: within it this thread has the worker's CPUs, if OpenMP pinned it; afterwards its own again."""
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
