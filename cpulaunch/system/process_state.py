"""What the kernel tells of a process in /proc/PID, where its name may hold any character, even ")"."""

from __future__ import annotations

import os
import select

from cpulaunch.system.files.reading import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

STATE, PARENT, GROUP, FLAGS, THREADS, START, EXIT_CODE = 0, 1, 2, 6, 17, 19, 49
"""Indexes of the fields after the name. Source: proc_pid_stat(5)."""

EXITING, LEAVING = 0x4, 0x8
"""Flags of a thread in its exit; since Linux 5.16, the second one is set before a tracer may hold the thread there.

Source: Linux, include/linux/sched.h, PF_EXITING and PF_POSTCOREDUMP; kernel/exit.c, do_exit; PTRACE_O_TRACEEXIT.
"""

MAX_NAMESPACES = 32
"""Of pids, each in another one. Source: Linux, include/linux/pid_namespace.h, MAX_PID_NS_LEVEL."""

MAX_DIGITS = 7
"""Of a process id. Source: Linux, include/linux/threads.h, PID_MAX_LIMIT."""


def process_ids(words: Iterable[str | bytes]) -> list[int]:
    """Those of the words that can be process ids: a worker of root may have put anything in place of /proc."""
    return [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS and int(word)]


def children_of(parent: int) -> frozenset[int]:
    """The pids of this parent's children, unreaped ones included; empty without /proc."""
    return frozenset(pid for pid in _all_pids() if stat_field(pid, PARENT) == parent)


def members_of(groups: frozenset[int]) -> dict[int, list[int]]:
    """The pids in each of these process groups, ascending; empty without /proc."""
    members: dict[int, list[int]] = {group: [] for group in groups}
    for pid in sorted(_all_pids()):
        group = stat_field(pid, GROUP)
        if group in groups:
            members[group].append(pid)
    return members


def _all_pids() -> list[int]:
    try:
        return process_ids(os.listdir("/proc"))
    except OSError:
        return []


def stat_fields(path: str) -> list[bytes]:
    """The fields after the name, of a process or thread by its folder in /proc. Raises: OSError if it is gone."""
    return read_proc(f"{path}/stat").rpartition(b")")[2].split()


def stat_field(pid: int, field: int) -> int | None:
    """One field after the process's name; None if the process is gone."""
    try:
        return int(stat_fields(f"/proc/{pid}")[field])
    except (OSError, IndexError, ValueError):
        return None


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; False if that is unknown.

    Read as bytes, as its name may be any. Source: proc_pid_status(5).
    """
    try:
        caught = read_proc(f"/proc/{pid}/status").partition(b"\nSigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    except (OSError, IndexError, ValueError):
        return False


def all_threads_ended(pid: int, *, proc: str = "/proc") -> bool:
    """Whether every thread of a process has ended, though the process may be unreaped; False if that is unknown.

    A thread that is traced stays until its tracer reaps it, and as long neither SIGCHLD, waitid(2) nor a pidfd shows
    the end of its process. One that its tracer holds in its exit counts as ended: not even SIGKILL makes it go on.
    Source: Linux, kernel/exit.c, exit_notify and delay_group_leader; kernel/signal.c, prepare_signal.
    """
    tasks = f"{proc}/{pid}/task"
    try:
        if os.readlink(f"{proc}/self") != str(os.getpid()):  # It is that of another pid namespace.
            return False
        if not _has_ended(f"{proc}/{pid}"):
            return False
        threads = os.listdir(tasks)
        # Listed again, as one that ended meanwhile may have started another.
        return all(_has_ended(f"{tasks}/{thread}") for thread in threads) and os.listdir(tasks) == threads
    except (OSError, IndexError, ValueError):
        return False


def _has_ended(path: str) -> bool:
    fields = stat_fields(path)
    is_held = fields[STATE] == b"t" and bool(int(fields[FLAGS]) & LEAVING)
    return is_held or fields[STATE] in (b"Z", b"X")


def has_ended_traced(pid: int) -> bool:
    """Whether a child has ended that waitid(2) does not show, as a tracer holds it, or what it has to wait for."""
    return _pidfd_shows_end(pid) or all_threads_ended(pid) or _waits_in_exit(pid)


def _waits_in_exit(pid: int, *, most: int = MAX_NAMESPACES) -> bool:
    """Whether the process is in its exit, in which it waits for children that have ended and that a tracer holds.

    So does the first process of a pid namespace, also for that of one inside it, in at `most` so many namespaces.
    Source: Linux, kernel/pid_namespace.c, zap_pid_ns_processes.
    """
    try:
        fields = stat_fields(f"/proc/{pid}")
        waits = fields[STATE] == b"S" and bool(int(fields[FLAGS]) & EXITING)
    except (OSError, IndexError, ValueError):
        return False
    children = children_of(pid) if waits and most else ()
    return bool(children) and all(all_threads_ended(each) or _waits_in_exit(each, most=most - 1) for each in children)


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process; None where there is none: before Linux 5.3, in a sandbox, without a free one."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _pidfd_shows_end(pid: int) -> bool:
    pidfd = open_pidfd(pid)
    if pidfd is None:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(0))
    os.close(pidfd)
    return ended
