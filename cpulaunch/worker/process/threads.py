"""torch's thread counts, set as planned whatever the environment or the OpenMP runtime has set."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from functools import wraps

import torch

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process.pinning import pins
from cpulaunch.worker.reporting.degradation import warned
from cpulaunch.worker.reporting.process_identity import is_worker


def set_threads(settings: TorchSettings) -> str:
    """Effect: sets the number of threads of an operation as planned; warns if there are fewer CPUs than threads.

    A child process that was started with fewer threads (torchrun's ranks, workers of a pool) keeps its number.
    """
    planned = settings.threads or 1
    found = torch.get_num_threads()
    if found > planned or (found < planned and is_worker()):
        torch.set_num_threads(planned)
    with suppress(OSError, AttributeError):  # Not on macOS and Windows.
        _check_cpus(settings, planned)
    if is_worker():
        atexit.register(_check_at_end, settings, planned, os.getpid())
    return _counted(planned, "thread")


def _check_cpus(settings: TorchSettings, planned: int) -> None:
    """Effect: warns if this thread may use fewer CPUs than planned, unless an OpenMP runtime pinned it on purpose.

    Source: sched_getaffinity(2).
    """
    cpus = os.sched_getaffinity(0)
    if len(cpus) < planned and not pins():
        warned(settings, f"{planned} threads share {_counted(len(cpus), 'CPU')} ({format_cpulist(cpus)})")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _check_at_end(settings: TorchSettings, planned: int, process: int) -> None:
    """Effect: warns if the program itself has lowered torch's number of threads; does nothing in forked children."""
    count = torch.get_num_threads()
    if count < planned and os.getpid() == process:
        warned(settings, f"the program set torch to {_counted(count, 'thread')}; the plan has {planned}")


def set_interop_threads(settings: TorchSettings) -> str:
    """Effect: sets the size of torch's inter-op thread pool. Raises: RuntimeError if the pool has started."""
    count = settings.interop_threads or 1
    plain = torch.set_num_interop_threads
    plain(count)

    @wraps(plain)
    def set_again(requested: int) -> None:
        """torch accepts one call per process; without this wrapper the program's own call would raise."""
        try:
            plain(requested)
        except RuntimeError:
            if requested == count:
                return
            threads = _counted(requested, "inter-op thread")
            warned(settings, f"the program requested {threads}; --interop-threads set {count}")

    torch.set_num_interop_threads = set_again
    return _counted(count, "inter-op thread")
