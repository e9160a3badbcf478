"""The descendants of a launcher process.

Source: /proc/PID/task/TID/children (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def split_tree(pid: int) -> tuple[list[int], list[int]]:
    """Ids of `pid` and its descendants: those with children, then the leaves. `pid` itself is never a leaf."""
    children = {parent: list(_children(parent)) for parent in _descend(pid)}
    parents = [each for each, below in children.items() if below or each == pid]
    return parents, [each for each, below in children.items() if not below and each != pid]


def _descend(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _descend(child)


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread may have ended.
            yield from map(int, thread.read_text().split())


def kill_tree(pid: int) -> None:
    """Effect: sends SIGKILL to `pid` and all its descendants."""
    for member in list(_descend(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
