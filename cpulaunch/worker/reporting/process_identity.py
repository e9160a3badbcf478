"""Which process this is: the worker itself, or one of its children that inherited the worker's settings."""

from __future__ import annotations

import os

MARK = "CPULAUNCH_WORKER_PID"
"""Set by the first process to apply the settings, inherited by its children. Holds that process's id."""


def claim() -> None:
    """Effect: this process is the worker, if none above it is."""
    os.environ.setdefault(MARK, str(os.getpid()))


def is_worker() -> bool:
    """Whether this process is the worker itself; its children stay quiet, so that nothing is said twice."""
    return os.environ.get(MARK, str(os.getpid())) == str(os.getpid())
