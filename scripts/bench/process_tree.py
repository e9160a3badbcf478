"""The processes below a launcher.

Source: /proc/PID/task/TID/children (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def split_tree(pid: int) -> tuple[list[int], list[int]]:
    """Process ids from `pid` downwards: those with children, and the leaves. A lone root counts as the former."""
    children = {parent: list(_children(parent)) for parent in _descend(pid)}
    inner = [parent for parent, below in children.items() if below or parent == pid]
    return inner, [leaf for leaf, below in children.items() if not below and leaf != pid]


def _descend(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _descend(child)


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            yield from map(int, thread.read_text().split())


def kill_tree(pid: int) -> None:
    """Effect: SIGKILL to `pid` and all below it."""
    for member in list(_descend(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
