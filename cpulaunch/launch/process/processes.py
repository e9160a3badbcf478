"""Child processes: listing, reaping and signalling them."""

from __future__ import annotations

import os
import time

from cpulaunch.launch.process.descendants import kill_descendants, signal_descendants
from cpulaunch.records.record import record
from cpulaunch.system.control_group import is_frozen, move_to_cgroup
from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.files.shared_memory import remove_shared_memory, remove_usual_names, started_at
from cpulaunch.system.libc import is_linux
from cpulaunch.system.process_state import (
    EXIT_CODE,
    PARENT,
    children_of,
    has_ended_traced,
    open_pidfd,
    process_ids,
    stat_field,
)
from cpulaunch.system.signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import TypeAlias

PAUSES, PAUSE_SECONDS = 50, 0.002
"""How long to wait for killed children before looking for others.

The end of one that is traced is seen only after that of its tracer, which may be an orphan that this process adopts
meanwhile, and so has to kill. Source: Linux, kernel/exit.c, wait_consider_task, "delay reaping".
"""

MAX_ROUNDS = 10
"""How often to kill the same children, each time after all pauses, before one that has ended is left to its tracer."""

MAX_STOPS = 1 << 10
"""Of traced children, whose threads may start and stop without end, before others have to be looked for again."""

DEFAULT_PID_MAX, PID_MAX_LIMIT = 1 << 15, 1 << 22
"""Source: Linux, include/linux/threads.h."""


def own_children() -> frozenset[int]:
    """The pids of this process's children, unreaped ones included. Takes one system call if there are none.

    Each is a child at the time of the call, and its pid is not given to another process before it is reaped.
    """
    if not hasattr(os, "waitid"):
        return children_of(os.getpid())
    if not _has_children(os.P_ALL, 0):
        return frozenset()
    listed = _listed_children() or children_of(os.getpid())
    # Checked, as /proc may be that of another pid namespace.
    return frozenset(filter(is_child, listed)) or _children_without_proc()


def endable_children() -> frozenset[int]:
    """The pids of the children that this process may signal.

    The others are setuid programs that run as another user, for whose end the launch would wait as long as they like.
    """
    return frozenset(pid for pid in own_children() if signal_process(pid, 0))


def is_child(pid: int) -> bool:
    """Whether the process is a child of this one, be it unreaped."""
    return not hasattr(os, "waitid") or _has_children(os.P_PID, pid)


def _has_children(kind: int, number: int) -> bool:
    try:
        os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _listed_children() -> frozenset[int]:
    """The pids of the children, as the kernel lists them; empty without /proc or CONFIG_PROC_CHILDREN.

    Source: proc(5), /proc/PID/task/TID/children: it may lack some while others end.
    """
    pids: list[bytes] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            pids += read_proc(f"/proc/self/task/{thread}/children").split()
    except OSError:
        return frozenset()
    return frozenset(process_ids(pids))


def _children_without_proc() -> frozenset[int]:
    """The pids of the children, found by asking about each pid that a descendant may have: 2 microseconds each.

    Pids are given in ascending order and start again at the lowest. Source: Linux, kernel/pid.c.
    """
    own, newest = os.getpid(), _newest_pid()
    if newest > own:
        return frozenset(filter(is_child, range(own + 1, newest)))
    for last in (DEFAULT_PID_MAX, PID_MAX_LIMIT):
        found = frozenset(filter(is_child, (*range(2, newest), *range(own + 1, last))))
        if found:
            return found
    return frozenset()


def _newest_pid() -> int:
    """The pid that the kernel gives to a process now; if it gives none, the highest possible."""
    try:
        pid = os.fork()
    except OSError:
        return PID_MAX_LIMIT
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def kill_children(
    spared: frozenset[int] = frozenset(), *, ended: frozenset[int] = frozenset(), since: float | None = None
) -> bool:
    """Whether all shared memory was found of those that were killed, and of those that `ended` before, after `since`.

    Effect: kills and reaps every child but those `spared`, and every orphan that this process adopts meanwhile.

    Does not wait for one that it may not signal, nor for one that has ended and that a process from outside the launch
    traces and does not let go of. Removes that shared memory. `since`: by default the start of this process.
    """
    before: list[int] = []
    rounds = 0
    while killed := [pid for pid in own_children() - spared if signal_process(pid, signal.SIGKILL)]:
        since = started_at(os.getpid()) if since is None else since  # After the first kill, as it may fail.
        rounds = rounds + 1 if killed == before else 0
        if rounds:
            kill_descendants(spared)  # A process below them holds them at their end.
        if rounds > MAX_ROUNDS:
            spared |= frozenset(filter(has_ended_traced, killed))
        before = killed
        ended |= _reap_all(killed, since)
    return since is None or remove_shared_memory(ended, since=since)  # Others that were killed used what is left of it.


def _reap_all(killed: list[int], since: float) -> frozenset[int]:
    """The children that were killed. Effect: reaps those that end in the next moment.

    Removes what the killed ones could not remove themselves before their pids are released.
    """
    ended, pauses = [], PAUSES
    for pid in killed:
        while not (has_ended := _has_ended(pid)) and pauses:
            time.sleep(PAUSE_SECONDS)
            pauses -= 1
        if has_ended:
            ended.append(pid)
    dead = frozenset(filter(_was_killed, ended))
    remove_usual_names(dead, since=since)
    for pid in ended:
        _release(pid)
    return dead


def _has_ended(pid: int) -> bool:
    """Whether the child can be reaped, which where waitid(2) is missing takes as long as it runs."""
    return not hasattr(os, "waitid") or ended_child(pid) is not None or not is_child(pid)


def _was_killed(pid: int) -> bool:
    """Whether a signal ended the child, which is unreaped; False where waitid(2) is missing."""
    ended = ended_child(pid) if hasattr(os, "waitid") else None
    return ended is not None and ended.status < 0


def _release(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


@record
class ExitedChild:
    """A child that has ended. `status`: its exit code, or minus its signal; `unreaped`: it still holds its pid."""

    pid: int
    status: int
    unreaped: bool


def ended_child(pid: int | None = None) -> ExitedChild | None:
    """A child (`pid` None: any) that has ended; None if none has.

    It stays unreaped where the system has waitid(2); Python < 3.13 on macOS has not.
    """
    try:
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            return ExitedChild(pid=pid, status=os.waitstatus_to_exitcode(status), unreaped=False) if pid else None
        which = (os.P_ALL, 0) if pid is None else (os.P_PID, pid)
        for _ in range(MAX_STOPS):
            ended = os.waitid(*which, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_code not in (os.CLD_TRAPPED, os.CLD_STOPPED):
                break
            # Of a child that this process traces (PTRACE_TRACEME), each wait shows the stops too, instead of ends.
            os.waitid(os.P_PID, ended.si_pid, os.WSTOPPED | os.WNOHANG)
        else:
            return None  # What has ended behind them is found after the next SIGCHLD.
    except ChildProcessError:
        return None
    if ended is None or not ended.si_pid:
        return None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return ExitedChild(pid=ended.si_pid, status=status, unreaped=True)


def traced_status(pid: int) -> int:
    """The exit code of an ended child that is traced, or minus the signal that killed it; SIGKILL if /proc is silent.

    Source: proc(5), /proc/pid/stat, exit_code, which is 0 for a process that this one may not inspect; namespaces(7).
    Before Linux 5.17 it is that of the first thread, which is another one only if that thread has ended by itself.
    """
    try:
        os.readlink(f"/proc/{pid}/ns/user")  # Refused to who may not inspect it.
    except OSError:
        return -signal.SIGKILL
    status = stat_field(pid, EXIT_CODE)
    if status is None or stat_field(pid, PARENT) != os.getpid():  # /proc may be that of another pid namespace.
        return -signal.SIGKILL
    try:
        return os.waitstatus_to_exitcode(status)
    except (ValueError, OverflowError):  # Nor need it be the kernel's.
        return -signal.SIGKILL


def reap(ended: ExitedChild) -> None:
    """Effect: releases the ended child's pid."""
    if ended.unreaped:
        os.waitpid(ended.pid, 0)


def reap_measured(ended: ExitedChild) -> int | None:
    """Peak memory in bytes of the ended child or of a child that it waited for, whichever is larger; None if unknown.

    Effect: releases its pid; wait4 imports `resource`. Source: getrusage(2), ru_maxrss, in KiB, on macOS in bytes.
    """
    if not ended.unreaped:
        return None
    usage = os.wait4(ended.pid, 0)[2]
    return usage.ru_maxrss * (1024 if is_linux() else 1)


def signal_process(pid: int, number: int) -> bool:
    """Whether the process was there and may be signalled. Effect: sends it this signal (0: none)."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_refused(pid: int) -> bool:
    """Whether a child may not be signalled, as it runs as another user: a setuid program."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


@record
class GuardProcess:
    """A guard, as those below it know it. `cgroup`: where it belongs, if it can be moved there."""

    pid: int
    pidfd: int | None
    cgroup: str | None


Guards: TypeAlias = tuple[GuardProcess, ...]
"""From above: each is the parent of the next one."""


def this_guard(cgroup: str | None) -> GuardProcess:
    """This process, in the cgroup above that of the launch."""
    own = os.getpid()
    return GuardProcess(pid=own, pidfd=open_pidfd(own), cgroup=None if cgroup is None else os.path.dirname(cgroup))


def continue_guards(guards: Guards) -> None:
    """Effect: the lowest guard goes on, this process's parent, or, if that was killed, all guards above.

    A worker may have stopped or frozen them.
    """
    for guard in guards[-1:] if guards and os.getppid() == guards[-1].pid else guards:
        if _continue(guard) and guard.cgroup is not None and is_frozen(guard.pid):
            move_to_cgroup(guard.cgroup, guard.pid)


def _continue(guard: GuardProcess) -> bool:
    """Whether the guard was there. Effect: it goes on, if it was stopped."""
    if guard.pidfd is None:  # Its pid may be another's by now, unless it is this one's parent.
        return os.getppid() == guard.pid and signal_process(guard.pid, signal.SIGCONT)
    try:
        signal.pidfd_send_signal(guard.pidfd, signal.SIGCONT)
    except OSError:
        return False
    return True


def continue_stopped(child: int, *, paused: bool) -> None:
    """Effect: a child that a signal has stopped goes on, unless that is SIGTSTP while it is `paused` by Ctrl-Z.

    Needs waitid(2).
    """
    try:
        stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG)
    except (AttributeError, ChildProcessError):
        return
    if stopped is not None and not (paused and stopped.si_status == signal.SIGTSTP):
        signal_process(child, signal.SIGCONT)


def signal_child(pid: int, number: int) -> None:
    """Effect: sends this signal to the process if it is a child of this one, as its pid may be another's by now."""
    if is_child(pid):
        signal_process(pid, number)


def signal_workers(pids: Sequence[int], number: int, *, adopts: bool, ended: Collection[int] = ()) -> None:
    """Effect: sends this signal to workers and the members of the groups that they started in.

    A worker itself may have left its group. Once it is reaped, its pid may name another process or group: where this
    process `adopts` orphans, only its own descendants in the group then get the signal; without /proc or pidfds, only
    its children. `ended`: those known to have ended, by which they are reaped where waitid(2) is missing.
    """
    reaped = frozenset(pid for pid in pids if not is_child(pid) or (pid in ended and not hasattr(os, "waitid")))
    for pid in pids:
        if pid not in reaped and _group_of(pid) != pid:
            signal_process(pid, number)
        if pid not in reaped or not adopts:
            signal_group(pid, number)
    if reaped and adopts:  # All at once: others may have started so many processes that a look at them takes a second.
        children = frozenset(child for child in own_children() if _group_of(child) in reaped)
        for child in children:
            signal_process(child, number)
        signal_descendants(reaped, number, spared=children)


def _group_of(pid: int) -> int | None:
    """The number of the process's group; None if the process is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _has_living_members(group: int) -> bool:
    """Whether a living child of this process is in the group, on Linux.

    Asked without WEXITED, waitid(2) knows no child in a group of which all have ended. Source: Linux, kernel/exit.c,
    wait_consider_task.
    """
    try:
        os.waitid(os.P_PGID, group, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def signal_group(group: int, number: int) -> None:
    """Effect: sends this signal to the members of the process group, except those that may not be signalled."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def group_exists(group: int, *, adopts: bool) -> bool:
    """Whether an ended worker's process group has members whose end this process will notice.

    Where it `adopts` orphans, these are its children: members that another orphan started become so when that ends.
    Effect: on systems without orphan adoption (all but Linux), kills the members instead, and the group is gone.
    """
    if not is_linux():
        signal_group(group, signal.SIGKILL)
        return False
    if adopts:
        return _has_living_members(group)
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # Only processes of other users (a setuid program) are left.
    return True
