"""Set-up of the thread that runs a group's collectives: its CPUs, short time slices, and no OpenMP threads."""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping

import torch

from cpulaunch.records.torch_settings import VARIABLE, decode
from cpulaunch.worker.process.pinning import move, pins, worker_cpus


def start_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Effect: starts a thread that does not keep the program alive. Raises: RuntimeError."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def thread_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs for the thread; empty if it can keep the CPUs of the thread that starts it."""
    return own_cpus(environ) or unpinned_cpus(environ)


def unpinned_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """All CPUs of the worker if OpenMP pins threads, else empty.

    A pinned thread has a single CPU, on which it computes; a thread that it starts would inherit that CPU.
    """
    text = environ.get(VARIABLE) if pins() else None
    return worker_cpus(decode(text)) if text else frozenset()


def own_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs that the launch reserved for this rank's communication; empty if it reserved none.

    Source: oneCCL's CCL_WORKER_AFFINITY, which lists the CPUs of all local ranks' communication threads in rank order.
    """
    try:
        cpus = [int(cpu) for cpu in environ.get("CCL_WORKER_AFFINITY", "").split(",")]
        count = int(environ.get("CCL_WORKER_COUNT", "1"))
        # LOCAL_RANK may be 0 in all ranks (--virtual-local-rank).
        rank = int(environ.get("CCL_LOCAL_RANK") or environ.get("LOCAL_RANK", ""))
    except ValueError:
        return frozenset()
    return frozenset(cpus[rank * count : (rank + 1) * count])


_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority; slice, deadline and period in nanoseconds."""
SLICE_NS = 100_000
"""The shortest time slice that the kernel grants, in nanoseconds."""
_SYSCALL_SCHED_SETATTR = 314


def request_short_slices() -> None:
    """Effect: requests the shortest time slices for this thread, so that it runs soon after it wakes.

    The thread works in short bursts for which other ranks wait; computing threads have slices of milliseconds. Linux
    before 6.12 ignores the request. A program that was started with another policy (chrt) keeps that policy.
    Source: sched_setattr(2); Documentation/scheduler/sched-eevdf.rst.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, os.nice(0), 0, SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(_SYSCALL_SCHED_SETATTR, 0, attributes, 0)


def configure_thread(cpus: frozenset[int]) -> None:
    """Effect: this thread runs on `cpus`, unless that is empty; torch operations in it start no threads."""
    if cpus:
        move(cpus)
    request_short_slices()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # OpenMP sets the number for this thread alone, but torch also for threads started later: restore it for those.
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
