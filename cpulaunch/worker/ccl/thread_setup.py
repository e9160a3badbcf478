"""Set-up of the thread that runs a group's works: its CPUs, its time slices, and no OpenMP threads."""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from cpulaunch.records.torch_settings import VARIABLE, decode
from cpulaunch.worker.process.pinning import move, pins, worker_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def thread_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs for the thread; empty where it may stay on those of the thread that starts it."""
    return own_cpus(environ) or unpinned_cpus(environ)


def unpinned_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The worker's CPUs where OpenMP pins threads: the one that starts another has a single CPU, and computes there."""
    text = environ.get(VARIABLE) if pins() else None
    return worker_cpus(decode(text)) if text else frozenset()


def own_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs that the launch set apart for this rank's communication; none if it did not.

    Source: oneCCL's CCL_WORKER_AFFINITY, a list of CPUs for the workers of all local ranks, one after another.
    """
    try:
        cpus = [int(cpu) for cpu in environ.get("CCL_WORKER_AFFINITY", "").split(",")]
        count = int(environ.get("CCL_WORKER_COUNT", "1"))
        # LOCAL_RANK may be 0 in all ranks (--virtual-local-rank).
        rank = int(environ.get("CCL_LOCAL_RANK") or environ.get("LOCAL_RANK", ""))
    except ValueError:
        return frozenset()
    return frozenset(cpus[rank * count : (rank + 1) * count])


class _Attributes(ctypes.Structure):
    """struct sched_attr, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


SLICE_NS = 100_000
"""The shortest that the kernel grants."""
_SYSCALL_SCHED_SETATTR = 314


def request_short_slices() -> None:
    """Effect: when this thread wakes, it need not wait until one that computes has used up its slice of milliseconds.

    It works in short bursts, and other ranks wait for it. Linux before 6.12 takes no notice. A program that was started
    with another policy (chrt) keeps it. Source: sched_setattr(2); Documentation/scheduler/sched-eevdf.rst.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    wanted = _Attributes(size=ctypes.sizeof(_Attributes), runtime_ns=SLICE_NS, nice=os.nice(0))
    ctypes.CDLL(None).syscall(_SYSCALL_SCHED_SETATTR, 0, ctypes.byref(wanted), 0)


def configure_thread(cpus: frozenset[int]) -> None:
    """Effect: this thread runs on these CPUs, if there are any, and its operations start no threads."""
    if cpus:
        move(cpus)
    request_short_slices()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # OpenMP keeps the number for this thread; torch keeps it for threads to come, which shall have the program's.
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
