"""The guards: the process that the user started, and between it and the supervisor a second one.

The outer guard forwards signals to the supervisor and waits for the end; the inner guard does nothing but wait. Any
two of the three may be killed at the same moment, and the third ends everything: when the outer guard dies, its end of
the pipe to the supervisor closes; when the supervisor or the inner guard dies, its parent reaps it. All three adopt
orphans, so every descendant of a worker belongs to the one that is left. A signal arrives only once, through the outer
guard: each of the three has its own process group, and the other two block every signal they can.

A process that had children before it became the outer guard (`exec cpulaunch` in a shell with background jobs) would
adopt their orphans too. It adopts none, and another inner guard does so in its place.
"""

from __future__ import annotations

import os
import time

from cpulaunch.launch.process.child_watch import ChildWatch, await_ends, has_exited
from cpulaunch.launch.process.descendants import end_launches, kill_descendants
from cpulaunch.launch.process.descriptors import (
    fork_error,
    open_standard_descriptors,
    raise_fd_limit,
    release_descriptors,
    reserve_descriptors,
)
from cpulaunch.launch.process.processes import (
    continue_guards,
    kill_children,
    own_children,
    signal_process,
    this_guard,
    traced_status,
)
from cpulaunch.launch.process.replace import flush_standard_streams
from cpulaunch.launch.process.run_directory import Remains
from cpulaunch.launch.process.spawn import Inherited
from cpulaunch.launch.process.watchdog import FailureWatch, Watchdog
from cpulaunch.records.record import record
from cpulaunch.system.control_group import LaunchCgroup, choose_cgroup, make_cgroup, move_to_cgroup, remove_leftovers
from cpulaunch.system.files.folders import path_exists
from cpulaunch.system.libc import adopt_orphans, die_with_parent, is_linux, private_pipe
from cpulaunch.system.signals import ENDING, passed_on, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from cpulaunch.launch.process.bind import Notify
    from cpulaunch.launch.process.processes import Guards

ABANDONED_SECONDS = 5.0
"""How long a supervisor may take to end after the outer guard was killed; then the inner one kills everything."""
ORPHAN_SECONDS = 1.0
"""The same after the inner guard was killed, for the outer one; and for launches whose supervisor was killed."""

RELEASE_SECONDS, RELEASE_PAUSE_SECONDS = 1.0, 0.01
"""How long a tracer from outside the launch, such as strace, may take to let go of a process that has ended."""


@record
class GuardLink:
    """What the supervisor gets from its guards.

    `control` is a pipe: it yields one byte for each signal that arrives, and ends when the outer guard dies.
    `adopts_orphans`: whether descendants of workers become the supervisor's children when their parents end.
    """

    control: int
    guards: Guards
    inherited: Inherited
    cgroup: LaunchCgroup | None = None
    adopts_orphans: bool = False


def fork_supervisor(  # noqa: PLR0913  # The caller becomes a guard, which has to know all this.
    notify: Notify,
    *,
    workers: int,
    grace_seconds: float,
    ending: frozenset[int] = ENDING,
    directory: str | None = None,
    logs: str | None = None,
    asks: bool = False,
    of_launchers: bool = False,
    shows_output: bool = False,
) -> GuardLink:
    """The supervisor's link to its guards; only the supervisor, a grandchild, returns.

    Effect: raises the limit on open files for this many workers, and forks twice. The calling process becomes the
    outer guard and ends with the supervisor's exit code. Each removes the run's `directory`, and that of its `logs` if
    it is empty, as the others may be killed or out of descriptors. A supervisor that reads none of the `ending`
    signals within the grace period is killed, with everything. If the guard `asks`, so is one that stops reading later
    although it has not stopped writing to its end of the pipe, which says that all workers have ended; and one that
    reaps no worker that failed, or whose workers are launchers (`of_launchers`) of which one does not. What measures
    reaps what it has adopted only at its end, and is not asked. If the supervisor `shows_output` of workers, a killed
    one may have left a line unfinished: what is said of its end follows a newline.
    Raises: LaunchError if the limit on open files or on processes is too low. Guards hold some descriptors in reserve.
    """
    open_standard_descriptors()
    descriptor_limit = raise_fd_limit(workers)
    reserve_descriptors()
    flush_standard_streams()
    signals, mask = _block_signals()
    notify_end = _on_new_line(notify) if shows_output else notify
    earlier_children = own_children()
    if not earlier_children:
        adopt_orphans()
    remains = Remains(directory=directory, cgroup=choose_cgroup(), logs=logs, has_launches=not asks)
    read, write = private_pipe()
    guards: Guards = (this_guard(remains.cgroup),)
    child = _fork()
    if child:
        failures = FailureWatch(
            child,
            guards=2 if earlier_children else 1,
            grace_seconds=grace_seconds,
            of_launchers=of_launchers,
            reaps=asks,
        )
        watchdog = Watchdog(
            write,
            unread=read,
            ending=ending,
            grace_seconds=grace_seconds,
            asks=asks,
            failures=failures if is_linux() else None,
        )
        stop = signals & {signal.SIGTSTP} - ending
        urgent = (ending & signals, frozenset({signal.SIGCHLD}))
        watch = ChildWatch(child, urgent=urgent, others=signals - ending - stop, kept=stop)
        try:
            code = _forward_signals(child, watchdog, watch, remains, spared=earlier_children)
            if code < 0 and watchdog.complaint is None:
                # The supervisor ends everything once this end is closed. If it were killed at once, and this process
                # just then, the run's directory would stay.
                os.close(write)
                await_ends(ORPHAN_SECONDS, earlier_children)
                if has_exited(earlier_children):
                    notify_end = notify  # The supervisor has ended its last line itself.
                end_launches(own=remains.directories, spared=earlier_children)  # It may have been killed as well.
        finally:  # Whatever the code: a worker may have kept the inner guard from ending everything.
            _end_and_remove(remains, earlier_children)
        if code < 0 or watchdog.complaint is not None:
            notify_end(watchdog.complaint or _killed_text(code))
        if remains.directory is not None and path_exists(remains.directory):
            notify(f"warning: cannot remove the files of this run: {remains.directory}")
        os._exit(_exit_code(code) if watchdog.exit_code is None else watchdog.exit_code)
    os.close(write)
    if earlier_children and is_linux():
        guards = _enter_adopting_guard(guards, read, remains, notify_end)
    cgroup = None
    if is_linux():
        guards, cgroup = _enter_inner_guard(guards, read, remains, notify_end)
    os.setpgid(0, 0)
    release_descriptors()
    adopts = adopt_orphans()
    if is_linux() and not (adopts or cgroup):
        notify("warning: prctl is refused here: processes that leave their worker's process group may outlive this run")
    return GuardLink(
        control=read,
        guards=guards,
        inherited=Inherited(signal_mask=mask, descriptor_limit=descriptor_limit),
        cgroup=cgroup,
        adopts_orphans=adopts,
    )


def _on_new_line(notify: Notify) -> Notify:
    """The same function, whose messages follow a newline."""
    return lambda text: notify(f"\n{text}")


def _block_signals() -> tuple[frozenset[int], frozenset[int]]:
    """The signals that reach the supervisor through its pipe, and the mask of this process before it blocked them."""
    signals = passed_on(signal.valid_signals())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD, signal.SIGTTOU})
    for number in signals | {signal.SIGCHLD}:
        # Never called, as all are blocked. But some systems drop a blocked signal whose action is to ignore it, and
        # an ignored SIGCHLD, which the parent may have left behind, would lose the exit codes.
        signal.signal(number, lambda *_: None)
    return signals, frozenset(int(number) for number in mask)


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        raise fork_error(error) from None


def _enter_adopting_guard(guards: Guards, control: int, remains: Remains, notify: Notify) -> Guards:
    """The guards, with the calling process, which becomes one that only waits; only its child returns.

    Raises: LaunchError.
    """
    os.setpgid(0, 0)
    adopt_orphans()
    own = this_guard(remains.cgroup)
    child = _fork()
    if child:
        os.close(control)
        _guard(child, guards, remains, notify)
    return (*guards, own)


def _guard(child: int, above: Guards, remains: Remains, notify: Notify) -> NoReturn:
    """Effect: this process waits until its child ends, ends everything, and ends with the child's exit code.

    If its parent ends first, the child has some seconds to end. If a worker has stopped a guard `above`, be it by a
    trace that ended with the tracer, it goes on.
    Raises: OSError, after it has ended everything: a worker may take away its descriptors (prlimit).
    """
    try:
        code = _wait_for(child, above[-1].pid, remains)
        if code < 0:
            end_launches(own=remains.directories)
        if code < 0 and remains.has_launches:
            await_ends(ORPHAN_SECONDS, frozenset())
    finally:
        try:
            _end_and_remove(remains)
        finally:
            continue_guards(above)
    if code < 0:
        notify(_killed_text(code))
    os._exit(_exit_code(code))


def _enter_inner_guard(
    guards: Guards, control: int, remains: Remains, notify: Notify
) -> tuple[Guards, LaunchCgroup | None]:
    """All guards, and the cgroup that the supervisor is in, if any; only it, the child of this process, returns.

    Effect: makes the cgroup. The calling process becomes the inner guard, and ends with the supervisor's exit code.
    Raises: LaunchError, with no cgroup left.
    """
    os.setpgid(0, 0)
    adopt_orphans()
    lock = None if remains.cgroup is None else make_cgroup(remains.cgroup)
    path = None if lock is None else remains.cgroup
    own = this_guard(remains.cgroup)
    moved, write = os.pipe()
    try:
        supervisor = _fork()
    except BaseException:
        release_descriptors()
        remains.remove()
        raise
    if supervisor == 0:
        os.close(write)
        return (*guards, own), None if path is None else LaunchCgroup(path, moved=moved)
    os.close(control)
    os.close(moved)
    if path is not None:
        if move_to_cgroup(path, supervisor):  # The kernel takes milliseconds, in which the supervisor is imported.
            _tell_moved(write)
        remove_leftovers(path)
    os.close(write)
    _guard(supervisor, guards, remains, notify)


def _tell_moved(write: int) -> None:
    try:
        os.write(write, b"1")
    except BrokenPipeError:
        return  # The supervisor was killed.


def _wait_for(child: int, parent: int, remains: Remains) -> int:
    """The child's exit code, or minus the signal that killed it. Effect: see `_end_or_traced_end_of`.

    Kills everything if the child does not end soon after the parent: a worker may have stopped it.
    """
    watch = ChildWatch(child, urgent=(frozenset({signal.SIGCHLD}),))
    die_with_parent(signal.SIGCHLD, parent=parent)  # Blocked, so that it only ends a wait.
    deadline: float | None = None
    while (code := _end_or_traced_end_of(child, watch, remains)) is None:
        now = time.monotonic()
        if deadline is None and os.getppid() != parent:
            deadline = now + ABANDONED_SECONDS
        if deadline is not None and deadline <= now:
            end_launches(own=remains.directories)
            now = time.monotonic()
            deadline = now + RELEASE_SECONDS
            signal_process(child, signal.SIGKILL)
            remains.kill_cgroup()
            kill_descendants()
        watch.next_signal(None if deadline is None else deadline - now)
    return code


def _end_or_traced_end_of(
    child: int, watch: ChildWatch, remains: Remains, spared: frozenset[int] = frozenset()
) -> int | None:
    """The child's exit code, or minus the signal that killed it (SIGKILL if that is not told); None if it still runs.

    Effect: as `_end_of`. If it ended while a process traced it, which hides how, everything is ended, so that a tracer
    that belongs to the launch lets go of it.
    """
    code = _end_of(child)
    if code is not None or not watch.child_has_ended():
        return code
    end_launches(own=remains.directories, spared=spared, kept=child)
    _end_everything(remains, spared | {child})
    deadline = time.monotonic() + RELEASE_SECONDS
    while (code := _end_of(child)) is None and time.monotonic() < deadline:
        time.sleep(RELEASE_PAUSE_SECONDS)
    return traced_status(child) if code is None else code


def _end_of(child: int) -> int | None:
    """The child's exit code, or minus the signal that killed it; None if it still runs.

    Effect: reaps it; continues it if it is stopped, which only a worker or a person who debugs it can have done.
    """
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        signal_process(child, signal.SIGCONT)


def _forward_signals(
    child: int, watchdog: Watchdog, watch: ChildWatch, remains: Remains, *, spared: frozenset[int]
) -> int:
    """The inner guard's exit code, or minus the signal that killed it.

    Effect: forwards signals until the inner guard ends; kills everything if the supervisor answers none.
    """
    kept = child if spared and is_linux() else None  # At first: it adopts what this process does not.
    while True:
        number = watchdog.next_signal(watch)
        if number is None:
            end_launches(own=remains.directories, spared=spared, kept=kept)
            if kept is None:
                signal_process(child, signal.SIGKILL)
            remains.kill_cgroup()
            kill_descendants(spared, kept)
            kept = None
        elif number == signal.SIGCHLD:
            code = _end_or_traced_end_of(child, watch, remains, spared)
            if code is not None:
                return code
            _reap(spared)
        else:
            watchdog.forward(number)
            if number == signal.SIGTSTP:
                _stop_with_shell_job(watchdog)


def _reap(earlier_children: frozenset[int]) -> None:
    for pid in earlier_children:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _stop_with_shell_job(watchdog: Watchdog) -> None:
    """Effect: stops this process until SIGCONT, as a shell's job stops; if it cannot stop, resumes the workers.

    The kernel knows whether a shell controls this job, even through a script or `make`. If none does, it discards
    SIGTSTP, because no process would resume the job. Source: POSIX, orphaned process group.

    SIGTSTP is still pending, unless SIGCONT has come meanwhile: sent anew, it would take back that SIGCONT, and the job
    would stay stopped. Source: Linux, kernel/signal.c, prepare_signal.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    signal.signal(signal.SIGTSTP, handler)
    if signal.SIGCONT not in signal.sigpending():
        watchdog.forward(signal.SIGCONT)


def _end_and_remove(remains: Remains, spared: frozenset[int] = frozenset()) -> None:
    """Effect: every process of the launch but the guards is killed, and nothing else of it is left either."""
    release_descriptors()
    try:
        _end_everything(remains, spared)
    finally:
        remains.remove()


def _end_everything(remains: Remains, spared: frozenset[int] = frozenset()) -> None:
    """Effect: every process of the launch but the guards is killed, and reaped if this process adopted it."""
    remains.kill_cgroup()
    kill_children(spared)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _killed_text(code: int) -> str:
    return f"a process of the launcher was killed by signal {-code}; all workers were ended"
