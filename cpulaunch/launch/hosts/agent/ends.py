"""How torch's agent ends the ranks of an attempt, and what is left of them; imported only where torch is."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

from torch.distributed.elastic.multiprocessing import api

from cpulaunch.launch.hosts.agent.messages import MAX_KILLED
from cpulaunch.launch.process.processes import ended_child, is_child, is_refused, signal_process
from cpulaunch.system.files.shared_memory import SharedMemorySearches
from cpulaunch.system.libc import is_linux
from cpulaunch.system.process_state import has_ended_traced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import Popen
    from typing import Any

LEAST_SECONDS = 0.1
"""torch gives a rank that it has killed as long to be gone as it gave it to end, and then gives it up."""
KILLED_SECONDS, PAUSE_SECONDS = 30.0, 0.01
"""How long to wait for ranks that torch has given up, as it takes long to free much memory; between two looks."""


def end_ranks_within(grace_seconds: float, *, begin: Callable[[], None] = lambda: None) -> set[int]:
    """The pids of killed ranks, which come in as they end.

    Effect: torch's agent kills ranks after the grace period, and removes the shared memory of killed ones. It calls
    `begin` once before it ends those of an attempt; a signal that comes while it ends them does not give them longer.

    torch waits for 30 seconds after a failure and when hosts join or leave. No other process learns the ranks' pids.
    Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py, PContext.close.
    """
    close, searches = api.PContext.close, SharedMemorySearches()
    killed, left = set[int](), set[int]()
    begun, deadline = list[object](), 0.0

    def close_in_time(context: Any, death_sig: Any = None, timeout: float | None = None) -> None:
        nonlocal deadline
        try:
            if context not in begun:
                begun[:], deadline = [context], time.monotonic() + grace_seconds
                begin()
            for handler in context.subprocess_handlers.values():
                if not isinstance(handler.close, partial):  # torch closes the ranks again at the end of the job.
                    handler.close = partial(_close_if_permitted, handler.close, handler.proc, left)
            close(context, death_sig, max(deadline - time.monotonic(), LEAST_SECONDS))
            _await_killed(_ranks(context))
        finally:
            ended = _killed(_ranks(context))
            killed.update(list(ended)[: MAX_KILLED - len(killed)])
            searches.remove(ended)

    api.PContext.close = close_in_time
    return killed


def _ranks(context: Any) -> list[Popen[bytes]]:
    return [handler.proc for handler in context.subprocess_handlers.values()]


def _close_if_permitted(close: Callable[..., None], rank: Any, left: set[int], death_sig: Any = None) -> None:
    """Effect: closes the handler of a rank, and says once if that may not be signalled: a setuid program."""
    try:
        close(death_sig=death_sig)
    except PermissionError:
        if death_sig == signal.SIGKILL and rank.pid not in left:  # After SIGTERM it may end by itself.
            sys.stderr.write(f"cpulaunch: warning: process {rank.pid} runs as another user and is left\n")
            left.add(rank.pid)
            rank.wait = lambda timeout=None: rank.poll()  # Each close waits twice for it.


def _await_killed(ranks: list[Popen[bytes]]) -> None:
    """Effect: ranks that torch has given up have ended, though a tracer may hold them, or thirty seconds are over.

    Of a rank that this process traces (PTRACE_TRACEME), torch takes a stop for its end.
    """
    end = time.monotonic() + KILLED_SECONDS
    for rank in ranks:
        if rank.poll() is None and is_refused(rank.pid):
            continue
        if rank.poll() is not None and _runs(rank):
            signal_process(rank.pid, signal.SIGKILL)
        while _runs(rank) and not has_ended_traced(rank.pid) and time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)


def _runs(rank: Popen[bytes]) -> bool:
    """Whether the rank has not ended. Effect: reaps it."""
    if rank.poll() is None:
        return True
    if is_linux() and ended_child(rank.pid) is not None:
        os.waitpid(rank.pid, 0)
    return is_linux() and is_child(rank.pid)


def _killed(ranks: list[Popen[bytes]]) -> frozenset[int]:
    """The pids of those ranks that a signal has ended."""
    return frozenset(rank.pid for rank in ranks if (rank.returncode or 0) < 0)
