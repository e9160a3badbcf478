"""Children: which there are, which have ended, and signals to those that may be gone."""

import os
import select
import signal

from cpulaunch.records.record import record
from cpulaunch.system.libc import is_linux

PARENT, GROUP = 1, 2
"""Which field after the name in /proc/PID/stat. Source: proc(5): "pid (name) state ppid pgrp …"."""


def children_of(parent: int) -> frozenset[int]:
    """The pids whose parent is `parent`, ended and unreaped ones included; empty without /proc."""
    return frozenset(pid for pid in _all_pids() if _stat_field(pid, PARENT) == parent)


def members_of(groups: frozenset[int]) -> dict[int, list[int]]:
    """The pids in each of these process groups, ascending; empty without /proc."""
    members: dict[int, list[int]] = {group: [] for group in groups}
    for pid in sorted(_all_pids()):
        group = _stat_field(pid, GROUP)
        if group in groups:
            members[group].append(pid)
    return members


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def own_children() -> frozenset[int]:
    """The pids of this process's children, ended and unreaped ones included; usually one system call."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return frozenset()
    return children_of(os.getpid())


def kill_children(spared: frozenset[int] = frozenset()) -> None:
    """Effect: no child of this process is left, nor any that becomes one when its parent is killed."""
    while pids := own_children() - spared:
        for pid in pids:
            signal_process(pid, signal.SIGKILL)
        for pid in pids:
            _wait_for(pid)


def _wait_for(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


@record
class ExitedChild:
    """A child that ended: its exit code, or minus its signal. `unreaped`: its pid is not free yet."""

    pid: int
    status: int
    unreaped: bool


def ended_child(pid: int | None = None) -> ExitedChild | None:
    """A child (None: any) that has ended, left unreaped where the system can (Python < 3.13 on macOS cannot)."""
    try:
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            return ExitedChild(pid=pid, status=os.waitstatus_to_exitcode(status), unreaped=False) if pid else None
        which = (os.P_ALL, 0) if pid is None else (os.P_PID, pid)
        ended = os.waitid(*which, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None or not ended.si_pid:
        return None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return ExitedChild(pid=ended.si_pid, status=status, unreaped=True)


class ExitQueue:
    """Children in the order of their ends. Alone, waitid(2) tells of those that have ended in the order of their start.

    Where there is no pidfd (before Linux 5.3, other systems, a sandbox), that must do. Source: pidfd_open(2);
    epoll(7): what became ready first is told first.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(os, "pidfd_open") else None
        self._pid_of: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Effect: the child's end has its place among the others'."""
        if self._epoll is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
            self._epoll.register(pidfd, select.EPOLLIN)
            self._pid_of[pidfd] = pid
        except OSError:
            return

    def close(self) -> None:
        """Effect: no descriptor is left of it."""
        for pidfd in self._pid_of:
            os.close(pidfd)
        self._pid_of.clear()
        if self._epoll is not None:
            self._epoll.close()

    def first(self) -> ExitedChild | None:
        """The watched child that ended first, then any other that has ended."""
        ended = ended_child()
        if ended is None or self._epoll is None:
            return ended
        for pidfd, _ in self._epoll.poll(0, 1):
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            return ended_child(self._pid_of.pop(pidfd)) or ended
        return ended


def reap(ended: ExitedChild) -> None:
    """Effect: the ended child's pid is free."""
    if ended.unreaped:
        os.waitpid(ended.pid, 0)


def reap_measured(ended: ExitedChild) -> int | None:
    """Peak memory in bytes of the ended child, or of a child it waited for; None where that is lost.

    Effect: its pid is free; imports `resource`. Source: getrusage(2), ru_maxrss, in KiB, on macOS in bytes.
    """
    if not ended.unreaped:
        return None
    usage = os.wait4(ended.pid, 0)[2]
    return usage.ru_maxrss * (1024 if is_linux() else 1)


def _stat_field(pid: int, field: int) -> int | None:
    """A number that proc(5) puts after the process's name, which may hold anything, ")" too."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[field])
    except (OSError, IndexError, ValueError):
        return None


def signal_process(pid: int, number: int) -> None:
    """Effect: the process has the signal, unless it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def signal_group(group: int, number: int) -> None:
    """Effect: every member of the process group that may be signalled has the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def group_lives(group: int) -> bool:
    """Whether the process group of an ended worker has a member whose end will be noticed.

    Effect: where orphans are not adopted (not Linux) its members are killed, as nobody would tell of their end.
    """
    if not is_linux():
        signal_group(group, signal.SIGKILL)
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # Only members of other users (a setuid program) are left.
    return True
