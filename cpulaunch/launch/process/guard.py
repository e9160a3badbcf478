"""The process the user started, while its child supervises: it passes signals on and waits.

Two processes, so that each can end everything if the other is killed. The supervisor sees its pipe from
the guard close when the guard dies; the guard sees its child end. Both adopt orphans, so no descendant of
a worker escapes: it belongs to whichever of the two is left. Signals arrive once, through the guard: the
supervisor has its own process group and blocks all it can.
"""

from __future__ import annotations

import os
import signal

from cpulaunch.launch.process.descriptors import fork_error
from cpulaunch.launch.process.processes import kill_children, own_children
from cpulaunch.launch.process.replace import flush_python
from cpulaunch.records.record import record
from cpulaunch.system.libc import adopt_orphans
from cpulaunch.system.signals import passed_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@record
class Guarded:
    """What the supervisor gets from its guard.

    `control` yields one byte per signal that arrived, and ends when the guard dies; `signal_mask` is the
    mask this launch was started with.
    """

    control: int
    signal_mask: frozenset[int]


def become_guarded(notify: Callable[[str], None], *, directory: str | None = None) -> Guarded:
    """The child's view of its guard.

    Effect: forks; only the child returns. The calling process ends with the child's exit code. Each of the two
    removes the run's `directory`, as the other may be killed or out of descriptors.
    Raises: LaunchError if there is no process to be had.
    """
    flush_python()
    signals = passed_on(signal.valid_signals())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD, signal.SIGTTOU})
    for number in signals | {signal.SIGCHLD}:
        # Never called, as all are blocked; but some systems drop signals that would be ignored, and a
        # SIGCHLD that the parent ignored would leave no exit codes.
        signal.signal(number, lambda *_: None)
    before = own_children()  # `exec cpulaunch` in a shell with jobs
    adopt_orphans()
    read, write = os.pipe()
    try:
        supervisor = os.fork()
    except OSError as error:
        raise fork_error(error) from None
    if supervisor:
        os.close(read)
        os.set_blocking(write, False)
        code = _guard(supervisor, control=write, signals=signals, spared=before, notify=notify)
        if directory is not None:
            from cpulaunch.launch.process.run_directory import remove_run_directory

            remove_run_directory(directory)
        os._exit(code if code >= 0 else 128 - code)
    os.close(write)
    os.setpgid(0, 0)
    adopt_orphans()
    return Guarded(control=read, signal_mask=frozenset(int(number) for number in mask))


def _guard(
    supervisor: int, *, control: int, signals: frozenset[int], spared: frozenset[int], notify: Callable[[str], None]
) -> int:
    """The supervisor's exit code, or minus the signal that killed it. Effect: passes signals on until then."""
    while True:
        number = signal.sigwait(signals | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            code = _reaped(supervisor)
            if code is not None:
                break
        else:
            _pass_on(control, number)
            if number == signal.SIGTSTP:
                _stop_like_any_job(control)
    if code < 0:
        kill_children(spared)
        notify(f"the supervisor was killed by signal {-code}; every worker was ended")
    return code


def _pass_on(control: int, number: int) -> None:
    try:
        os.write(control, bytes([number]))
    except (BlockingIOError, BrokenPipeError):
        return  # Thousands are waiting already, or the supervisor is ending.


def _reaped(supervisor: int) -> int | None:
    """The supervisor's exit code (negative: its signal) if it has ended. Effect: reaps every ended child."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == supervisor:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _stop_like_any_job(control: int) -> None:
    """Effect: this process is stopped until SIGCONT, which is then pending; the workers go on if it is not stopped.

    The kernel knows whether a shell watches this job, behind a script or `make` too, and else discards the
    signal, as nobody would ever resume it. Source: POSIX, orphaned process group.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    signal.signal(signal.SIGTSTP, handler)
    if signal.SIGCONT not in signal.sigpending():
        _pass_on(control, signal.SIGCONT)
