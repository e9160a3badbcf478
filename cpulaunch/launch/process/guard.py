"""The guard: the process that the user started. It forwards signals to the supervisor, its child, and waits for it.

There are two processes so that each can end everything if the other is killed. When the guard dies, its end of the
pipe to the supervisor closes; when the supervisor dies, the guard reaps it. Both adopt orphans, so every descendant
of a worker belongs to the one that is left. A signal arrives only once, through the guard: the supervisor has its own
process group and blocks every signal it can.
"""

from __future__ import annotations

import gc
import os
import signal

from cpulaunch.launch.process.descriptors import fork_error, open_standard_descriptors, raise_fd_limit
from cpulaunch.launch.process.processes import kill_children, own_children
from cpulaunch.launch.process.replace import flush_standard_streams
from cpulaunch.launch.process.spawn import Inherited
from cpulaunch.records.record import record
from cpulaunch.system.libc import adopt_orphans
from cpulaunch.system.signals import passed_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.process.bind import Notify


@record
class GuardLink:
    """What the supervisor gets from its guard.

    `control` is a pipe: it yields one byte for each signal that arrives, and ends when the guard dies.
    """

    control: int
    inherited: Inherited


def fork_supervisor(notify: Notify, *, workers: int, directory: str | None = None) -> GuardLink:
    """The supervisor's link to its guard; only the child, the supervisor, returns.

    Effect: raises the limit on open files for this many workers, forks, and collects garbage again in the child. The
    calling process becomes the guard and ends with the child's exit code. Both remove the run's `directory`, as the
    other may be killed or out of descriptors.
    Raises: LaunchError if the limit on open files or on processes is too low.
    """
    open_standard_descriptors()
    descriptor_limit = raise_fd_limit(workers)
    flush_standard_streams()
    signals = passed_on(signal.valid_signals())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD, signal.SIGTTOU})
    for number in signals | {signal.SIGCHLD}:
        # Never called, as all are blocked. But some systems drop a blocked signal whose action is to ignore it, and
        # an ignored SIGCHLD, which the parent may have left behind, would lose the exit codes.
        signal.signal(number, lambda *_: None)
    earlier_children = own_children()  # `exec cpulaunch` in a shell with background jobs.
    adopt_orphans()
    read, write = os.pipe()
    try:
        supervisor = os.fork()
    except OSError as error:
        raise fork_error(error) from None
    if supervisor:
        os.close(read)
        os.set_blocking(write, False)
        code = _guard(supervisor, control=write, signals=signals, spared=earlier_children, notify=notify)
        if directory is not None:
            from cpulaunch.launch.process.run_directory import remove_run_directory

            remove_run_directory(directory)
        os._exit(code if code >= 0 else 128 - code)
    os.close(write)
    os.setpgid(0, 0)
    adopt_orphans()
    gc.freeze()  # What exists by now stays until the end.
    gc.enable()
    mask_numbers = frozenset(int(number) for number in mask)
    return GuardLink(control=read, inherited=Inherited(signal_mask=mask_numbers, descriptor_limit=descriptor_limit))


def _guard(supervisor: int, *, control: int, signals: frozenset[int], spared: frozenset[int], notify: Notify) -> int:
    """The supervisor's exit code, or minus the signal that killed it.

    Effect: forwards `signals` until the supervisor ends. If it was killed, kills every child but those `spared`.
    """
    while True:
        number = signal.sigwait(signals | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            code = _reap(supervisor)
            if code is not None:
                break
        else:
            _forward(control, number)
            if number == signal.SIGTSTP:
                _stop_with_shell_job(control)
    if code < 0:
        kill_children(spared)
        notify(f"the supervisor was killed by signal {-code}; all workers were ended")
    return code


def _forward(control: int, number: int) -> None:
    try:
        os.write(control, bytes([number]))
    except (BlockingIOError, BrokenPipeError):
        return  # The pipe holds thousands of unread signals, or the supervisor is ending.


def _reap(supervisor: int) -> int | None:
    """The supervisor's exit code, or minus its signal; None if it still runs. Effect: reaps every ended child."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == supervisor:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _stop_with_shell_job(control: int) -> None:
    """Effect: stops this process until SIGCONT, as a shell's job stops; if it cannot stop, resumes the workers.

    The kernel knows whether a shell controls this job, even through a script or `make`. If none does, it discards
    SIGTSTP, because no process would resume the job. Source: POSIX, orphaned process group.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    signal.signal(signal.SIGTSTP, handler)
    if signal.SIGCONT not in signal.sigpending():
        _forward(control, signal.SIGCONT)
