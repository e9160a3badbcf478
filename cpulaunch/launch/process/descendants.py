"""Killing descendants that are not children: those of a child that cannot end, or of a launch that a worker started.

A process may hold the one that it traces at its end (PTRACE_O_TRACEEXIT), SIGKILL or not: its children then stay its
own, the tracer perhaps among them.
"""

from __future__ import annotations

import os
import select
import time
from itertools import islice

from cpulaunch.launch.process.run_directory import is_run_directory
from cpulaunch.records.record import record
from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.process_state import GROUP, PARENT, START, process_ids, stat_fields
from cpulaunch.system.signals import signal

LAUNCH_SECONDS = 1.0
"""How long the launches below this one may take to remove their files. No signal is read meanwhile."""
LOWER_SECONDS = 0.7
"""The same where the guard was killed, perhaps by an upper launch, which waits a second for this one."""

MOST_DESCRIPTORS = 1 << 10
"""Of a process, to look through: a worker may have a million."""


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


def end_launches(
    *,
    own: frozenset[str] = frozenset(),
    spared: frozenset[int] = frozenset(),
    kept: int | None = None,
    guard_is_gone: bool = False,
) -> None:
    """Effect: the launches of cpulaunch below this process have ended, with their files; or LAUNCH_SECONDS are over.

    For when everything is to be killed: all at once, as with a cgroup, they could remove nothing. If there are any,
    every descendant is killed but those that do so: the process that has the run's directory open, which then ends at
    once, and its parent, the inner guard. None where there is no /proc or no pidfd.

    `own`: directories of this run, which its supervisor or a worker may have open, as those that this process has.
    `spared`: children that, with what is below them, are none of the launch's. `kept`: a child that is not killed, but
    what is below it. `guard_is_gone`: for LOWER_SECONDS at most.
    """
    if not hasattr(os, "pidfd_open"):
        return
    deadline = time.monotonic() + (LOWER_SECONDS if guard_is_gone else LAUNCH_SECONDS)
    processes = _processes()
    below = descendants(processes, spared)
    known = _run_directories(os.getpid()) | own
    holders = [pid for pid in below if time.monotonic() < deadline and _run_directories(pid) - known]
    if not holders:
        return
    ending = frozenset(holders) | {processes[pid].parent for pid in holders}
    for pid in below:
        if pid not in ending and pid not in (kept, os.getpid()):
            _signal(pid, processes[pid], signal.SIGKILL)
    _await([pid for pid in below if pid in ending and pid != kept], deadline)


def _run_directories(pid: int) -> frozenset[str]:
    """The paths of directories of runs that a process has open. Its command line is not read: it may never be told.

    Source: proc(5), /proc/PID/cmdline, which is in the memory of the process: its pages may be those of a dead server.
    """
    folder = f"/proc/{pid}/fd"
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_DESCRIPTORS)]
    except OSError:
        return frozenset()
    return frozenset(path for name in names if (path := _run_directory(pid, name)) is not None)


def _run_directory(pid: int, number: str) -> str | None:
    """The path of the directory of a run that has this descriptor; None if it is none, as a file of such a name."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{number}")
        return path if is_run_directory(path) and _is_folder(pid, number) else None
    except (OSError, IndexError, ValueError):
        return None


def _is_folder(pid: int, number: str) -> bool:
    """Whether a descriptor was opened as that of a folder; what it leads to is not asked. Source: proc(5), fdinfo."""
    flags = read_proc(f"/proc/{pid}/fdinfo/{number}").partition(b"flags:")[2].split()[0]
    return bool(int(flags, 8) & os.O_DIRECTORY)


def _await(pids: list[int], deadline: float) -> None:
    """Effect: waits until these processes have ended, or the deadline (monotonic seconds) has passed."""
    ends, pidfds = select.poll(), set[int]()
    for pid in pids:
        try:
            pidfds.add(fd := os.pidfd_open(pid))
        except OSError:
            continue
        ends.register(fd, select.POLLIN)
    while pidfds and (left := deadline - time.monotonic()) > 0:
        for fd, _ in ends.poll(1000 * left):
            ends.unregister(fd)
            os.close(fd)
            pidfds.remove(fd)
    for fd in pidfds:
        os.close(fd)


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
