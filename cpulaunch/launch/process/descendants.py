"""Killing descendants that are not children: those of a child that cannot end.

A process may hold the one that it traces at its end (PTRACE_O_TRACEEXIT), SIGKILL or not: its children then stay its
own, the tracer perhaps among them.
"""

from __future__ import annotations

import os

from cpulaunch.records.record import record
from cpulaunch.system.process_state import GROUP, PARENT, START, process_ids, stat_fields
from cpulaunch.system.signals import signal


@record(kw_only=False)
class Seen:
    """What is known of a process: its parent's pid, its start in clock ticks since the host's, and its group."""

    parent: int
    start: int
    group: int = 0


def kill_descendants(spared: frozenset[int] = frozenset(), kept: int | None = None) -> None:
    """Effect: kills every descendant of this process but the children `spared` and what is below these.

    The process `kept` is not killed either, but what is below it; nor this one, whatever is in place of /proc.
    None where there is no /proc or no pidfd.
    """
    if not hasattr(os, "pidfd_open"):
        return
    processes = _processes()
    for pid in descendants(processes, spared):
        if pid not in (kept, os.getpid()):
            _signal(pid, processes[pid], signal.SIGKILL)


def signal_descendants(groups: frozenset[int], number: int, *, spared: frozenset[int]) -> None:
    """Effect: sends this signal to the descendants of this process in the groups, but not to those `spared`.

    None without /proc or pidfds.
    """
    if not hasattr(os, "pidfd_open"):
        return
    processes = _processes()
    for pid in descendants(processes, frozenset()):
        if pid != os.getpid() and pid not in spared and processes[pid].group in groups:
            _signal(pid, processes[pid], number, group=processes[pid].group)


def descendants(processes: dict[int, Seen], spared: frozenset[int]) -> list[int]:
    """The pids of the descendants of this process but those `spared`, parents first.

    No process starts before its parent: what seems to do so had another parent, whose pid was given again meanwhile.
    """
    children: dict[int, list[int]] = {}
    for pid, seen in processes.items():
        children.setdefault(seen.parent, []).append(pid)
    found = dict.fromkeys(pid for pid in children.get(os.getpid(), []) if pid not in spared)
    left = list(found)
    while left:
        parent = left.pop()
        below = [pid for pid in children.get(parent, []) if processes[pid].start >= processes[parent].start]
        left += [pid for pid in below if pid not in found]
        found |= dict.fromkeys(below)
    return list(found)


def _signal(pid: int, seen: Seen, number: int, *, group: int | None = None) -> None:
    """Effect: signals the process if it is the one that was seen, not another one with its pid, and in this group."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        now = _look_at(pid)
        if now is not None and now.start == seen.start and group in (None, now.group):
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return  # It has ended, or may not be signalled.
    finally:
        os.close(pidfd)


def _processes() -> dict[int, Seen]:
    """By pid; empty without /proc, and where that is the one of another pid namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return {}
        pids = process_ids(os.listdir("/proc"))
    except OSError:
        return {}
    return {pid: seen for pid in pids if (seen := _look_at(pid)) is not None}


def _look_at(pid: int) -> Seen | None:
    """What is known of the process; None if it is gone."""
    try:
        fields = stat_fields(f"/proc/{pid}")
        return Seen(int(fields[PARENT]), int(fields[START]), int(fields[GROUP]))
    except (OSError, IndexError, ValueError):
        return None
