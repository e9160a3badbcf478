"""How torch's agent ends the ranks of an attempt, and what is left of them; imported only where torch is."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import api

from cpulaunch.system.files.shared_memory import SharedMemorySearches, started_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LEAST_SECONDS, KILLED_SECONDS = 0.1, 30.0
"""torch waits as long for ranks as for one that it has killed, and then gives that up: much memory takes longer."""


def end_ranks_within(grace_seconds: float) -> None:
    """Effect: torch's agent kills ranks after the grace period, and removes the shared memory of killed ones.

    torch waits for 30 seconds after a failure and when hosts join or leave. No other process learns the ranks' pids.
    Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py, PContext.close.
    """
    close, searches = api.PContext.close, SharedMemorySearches()
    seconds, since = max(grace_seconds, LEAST_SECONDS), started_at(os.getpid())

    def close_in_time(context: Any, death_sig: Any = None, timeout: float | None = None) -> None:
        try:
            close(context, death_sig, seconds)
            _await_killed(context)
        finally:
            searches.remove(_killed(context), since=since)

    api.PContext.close = close_in_time


def _await_killed(context: Any) -> None:
    """Effect: ranks that torch has given up have ended, or thirty seconds are over."""
    end = time.monotonic() + KILLED_SECONDS
    for handler in getattr(context, "subprocess_handlers", {}).values():
        with suppress(subprocess.TimeoutExpired):
            handler.proc.wait(max(0.0, end - time.monotonic()))


def _killed(context: Any) -> frozenset[int]:
    """The pids of an attempt's ranks that a signal has ended."""
    processes = [handler.proc for handler in getattr(context, "subprocess_handlers", {}).values()]
    return frozenset(process.pid for process in processes if (process.returncode or 0) < 0)
