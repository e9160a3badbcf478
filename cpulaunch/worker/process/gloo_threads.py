"""Threads of gloo process groups, which must be idle when the interpreter shuts down.

A thread of gloo that drops the last reference to a tensor takes the GIL. If the interpreter is shutting down, CPython
ends the thread there instead, inside a C++ destructor, and the process dies of SIGABRT ("terminate called without an
active exception") after its work was done. The thread and the main thread share the CPU of a rank that is bound to one,
so the main thread may well get to the end first. Source: pytorch issues 38228 and 190489 (open in torch 2.13).
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress

from cpulaunch.records.torch_settings import TorchSettings

TASKS = "/proc/self/task"
NAME = "pt_gloo_runloop"
"""The name of these threads. Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp."""

LIMIT_SECONDS = 5.0
"""Longest wait: a thread that computes longer than this is left to its fate."""

POLL_SECONDS = 0.001


def install(settings: TorchSettings) -> None:
    """Effect: the process waits at its exit, before the interpreter shuts down, until gloo's threads are idle."""
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Effect: waits until gloo's threads, if there are any, sleep and have not run between two polls.

    The GIL is free between polls, so a thread that needs it is running or has run.
    """
    if "torch.distributed" not in sys.modules:
        return
    deadline = time.monotonic() + LIMIT_SECONDS
    before = None
    while (now := _states()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        time.sleep(POLL_SECONDS)


def _states() -> dict[str, tuple[str, str]]:
    """The state of each of gloo's threads and how often it has gone to sleep, by thread id. Source: proc(5)."""
    states = {}
    with suppress(OSError):
        for thread in os.listdir(TASKS):
            with suppress(OSError), open(f"{TASKS}/{thread}/status", errors="replace") as file:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
                if fields["Name"] == NAME:
                    states[thread] = (fields["State"][:1], fields.get("voluntary_ctxt_switches", ""))
    return states
