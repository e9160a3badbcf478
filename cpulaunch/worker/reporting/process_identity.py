"""Whether this process is the worker itself or a child process that inherited its settings."""

from __future__ import annotations

import os

MARK = "CPULAUNCH_WORKER_PID"
"""Process id of the worker: set by the first process that applies the settings, inherited by its children."""


def claim() -> None:
    """Effect: makes this process the worker, unless a parent process is."""
    os.environ.setdefault(MARK, str(os.getpid()))


def is_worker() -> bool:
    """Whether this process is the worker itself. Its children report nothing, so that nothing is reported twice."""
    return os.environ.get(MARK, str(os.getpid())) == str(os.getpid())
