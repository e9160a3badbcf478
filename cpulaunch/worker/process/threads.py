"""Thread counts: those of the plan, whatever the environment or the OpenMP runtime made of them."""

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
    """Effect: operations use the planned number of threads; a warning where they have fewer CPUs than that.

    A child that was started with fewer (torchrun's ranks, a pool's workers) keeps its own number.
    """
    planned = settings.threads or 1
    found = torch.get_num_threads()
    if found > planned or (found < planned and is_worker()):
        torch.set_num_threads(planned)
    with suppress(OSError, AttributeError):  # Not on macOS and Windows.
        _check_cpus(settings, planned)
    if is_worker():
        atexit.register(_check_at_end, settings, planned, os.getpid())
    return f"{planned} threads"


def _check_cpus(settings: TorchSettings, planned: int) -> None:
    """Source: sched_getaffinity(2); an OpenMP runtime that pins has bound this thread to one CPU on purpose."""
    cpus = os.sched_getaffinity(0)
    if len(cpus) < planned and not pins():
        warned(settings, f"{planned} threads share {len(cpus)} CPUs ({format_cpulist(cpus)})")


def _check_at_end(settings: TorchSettings, planned: int, process: int) -> None:
    """Effect: a warning if the program itself left torch with fewer threads; not in its forked children."""
    count = torch.get_num_threads()
    if count < planned and os.getpid() == process:
        warned(settings, f"the program set torch's threads to {count}; the plan gave it {planned}")


def set_interop_threads(settings: TorchSettings) -> str:
    """Effect: torch's pool for operations side by side has this size. Raises: RuntimeError once it has started."""
    count = settings.interop_threads or 1
    plain = torch.set_num_interop_threads
    plain(count)

    @wraps(plain)
    def refused(wanted: int) -> None:
        """torch takes one number in a process's life, so that the program's own call would end it."""
        try:
            plain(wanted)
        except RuntimeError:
            if wanted == count:
                return
            warned(settings, f"the program asked for {wanted} threads side by side; --interop-threads gave it {count}")

    torch.set_num_interop_threads = refused
    return f"{count} threads for operations side by side"
