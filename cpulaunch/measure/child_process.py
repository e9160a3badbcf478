"""One child process from its start to its end, with a time limit; nothing that it started is left afterwards."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import signal
import sys
import termios
import threading
import time
from contextlib import suppress

from cpulaunch.launch.process.bind import UNBOUND
from cpulaunch.launch.process.child_watch import MAX_WAIT_SECONDS, await_ends, wait_for_exit
from cpulaunch.launch.process.descriptors import StdioFds, fork_error
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.processes import kill_children, own_children, signal_child, signal_group
from cpulaunch.launch.process.program import find_executable
from cpulaunch.launch.process.spawn import Inherited, check_executed, spawn
from cpulaunch.records.record import field, record
from cpulaunch.system.libc import adopt_orphans, private_pipe
from cpulaunch.system.signals import ENDING, SIGCONT, SIGINT, SIGTSTP
from cpulaunch.system.terminal import leave_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 14
"""Kept of each stream's end."""
ASK_SECONDS = 0.1
"""Between two questions whether it is enough."""
GRACE_SECONDS = 10.0
"""How long a process may take to end after SIGTERM. A launch may give its workers longer; a measurement does not."""
LAST_SECONDS = 0.4
"""The same once the guard is gone: another one kills this process within a second or five."""
REMAINS_SECONDS = 6.0
"""How long a launch whose guard was killed may take to end, and to remove its files: the others may wait five."""


@record
class ChildResult:
    """How a child ended. `exit_code`: minus the signal if one ended it; None if it ran past its limit.

    `paused`: whether it was stopped for a while by Ctrl-Z, which `seconds` do not include. `enough`: whether it was
    ended because it had done all that was wanted of it.
    """

    exit_code: int | None
    seconds: float
    paused: bool = False
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    enough: bool = False


class Pauses:
    """How long children have been stopped by Ctrl-Z, in seconds: what a clock of measurements leaves out."""

    def __init__(self) -> None:
        self.seconds = 0.0


@record
class ChildSetup:
    """What a child gets.

    `control`: a pipe with the numbers of signals that arrive, as guards write it; None: they arrive at this process.
    `pauses`: where pauses are added up.
    """

    environ: Mapping[str, str]
    inherited: Inherited | None = None
    control: int | None = None
    pauses: Pauses = field(default_factory=Pauses)


def run_child(
    argv: Sequence[str],
    setup: ChildSetup,
    *,
    limit_seconds: float,
    receive: Sequence[Callable[[bytes], None]] = (),
    enough: Callable[[], bool] | None = None,
    guarded: bool = False,
) -> ChildResult:
    """How the command ended, which gets neither standard input nor a terminal. For the main thread.

    `receive`: take what it writes to stdout and to stderr. `enough`: asked again and again whether the command has
    done all that is wanted; then it is ended like one that ran past its limit. `guarded`: it is a launch, whose other
    processes remove its files if one is killed. Effect: every process that it started has ended when this returns or
    raises. Raises: KeyboardInterrupt after an ending signal; NotFoundError,
    NotExecutableError; LaunchError at the limit on processes.
    """
    adopt_orphans()
    leave_terminal()
    spared = own_children()
    try:
        child = _Child(argv, setup, receive)
    except RuntimeError:  # Threads count as processes: there may be none for the one that waits for its end.
        kill_children(spared)
        raise fork_error(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))) from None
    try:
        in_time = child.wait(limit_seconds, enough=enough)
        if not in_time:
            child.signal(signal.SIGTERM)
            child.wait(GRACE_SECONDS)
    except KeyboardInterrupt:
        child.signal(signal.SIGTERM)  # A launch removes its files.
        child.wait(GRACE_SECONDS, ending=True)
        raise
    finally:
        if guarded and child.exit_code is None:
            signal_child(child.pid, signal.SIGKILL)  # Not its other processes: they end all and remove its files.
        if guarded and (child.exit_code is None or child.exit_code < 0):
            await_ends(REMAINS_SECONDS, spared)
        kill_children(spared)
        child.close()
        setup.pauses.seconds += child.paused_seconds
    return ChildResult(
        exit_code=child.exit_code if in_time else None,
        seconds=child.seconds - child.paused_seconds,
        paused=child.paused_seconds > 0,
        stdout_tail=child.tails[0],
        stderr_tail=child.tails[1],
        enough=child.was_enough,
    )


class _Child:
    """A running command, with a thread that waits for its end and says so through a pipe."""

    def __init__(self, argv: Sequence[str], setup: ChildSetup, receive: Sequence[Callable[[bytes], None]]) -> None:
        """Effect: starts the command. Raises: NotFoundError, LaunchError."""
        path = find_executable(argv[0], setup.environ)
        inherited = setup.inherited or Inherited(
            signal_mask=frozenset(int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        )
        spec = ExecSpec(worker=0, path=path, argv=tuple(argv), environ=setup.environ, binding=UNBOUND)
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        stdio = StdioFds(stdin=null, stdout=out_end, stderr=errors_end, owned=(null, out_end, errors_end))
        self._streams = {out: 0, errors: 1}
        for fd in self._streams:
            os.set_blocking(fd, False)
        self._receive = tuple(receive)
        self._control = setup.control
        self.tails = [b"", b""]
        self.exit_code: int | None = None
        self.was_enough = self._interrupted = False
        self._started = time.monotonic()
        self.seconds = self.paused_seconds = 0.0
        spawned = spawn(spec, stdio=stdio, inherited=inherited)
        self.pid = spawned.pid
        self._spec = spec
        self._starting: int | None = spawned.error_fd
        self._ended, self._end_told = private_pipe()  # The command could write to any other, or keep it open.
        self._waiter = threading.Thread(target=self._wait_for_end, daemon=True)
        self._waiter.start()

    def _wait_for_end(self) -> None:
        self.exit_code = wait_for_exit(self.pid)  # None: it was killed and reaped by `run_child`.
        self.seconds = time.monotonic() - self._started
        os.close(self._end_told)

    def signal(self, number: int) -> None:
        """Effect: the command's group gets the signal, unless the command was reaped, and its number is another's."""
        if hasattr(os, "waitid") or self._waiter.is_alive():
            signal_group(self.pid, number)

    def wait(self, seconds: float, *, ending: bool = False, enough: Callable[[], bool] | None = None) -> bool:
        """Whether the command ends by itself within this time, pauses not included, and before it is `enough`.

        Effect: passes its output on; stops and continues it as Ctrl-Z and `fg` ask. Raises: KeyboardInterrupt after an
        ending signal; NotExecutableError. If it is `ending` already, a second Ctrl-C ends the wait at once, and the
        guard's end after LAST_SECONDS.
        """
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for fd in (*self._streams, self._ended, *([] if self._control is None else [self._control])):
            poll.register(fd, select.POLLIN)
        if self._starting is not None:
            poll.register(self._starting, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(min(left, MAX_WAIT_SECONDS if enough is None else ASK_SECONDS) * 1000)}
            if self._control is not None and self._control in ready:
                if ending:
                    deadline = min(deadline, self._last_moment(self._control, poll))
                else:
                    deadline += self._follow_control(self._control)
            if self._starting in ready or self._ended in ready:
                self._confirm_executed(poll)
            for fd in ready & self._streams.keys():
                if self._read(fd) == 0:
                    poll.unregister(fd)
            if self._ended in ready:
                return True
            if enough is not None and enough():
                self.was_enough = True
                return False
        return False

    def _confirm_executed(self, poll: select.poll) -> None:
        """Effect: the pipe that says why the command was not executed is closed if it was. Raises: LaunchError."""
        if self._starting is not None and check_executed(self._spec, self._starting):
            poll.unregister(self._starting)
            os.close(self._starting)
            self._starting = None

    def _follow_control(self, control: int) -> float:
        """How many seconds the command has been stopped because of signals that arrived. Effect: stops it so long.

        Raises: KeyboardInterrupt if a signal has arrived that ends a launch, or none can arrive any more.
        """
        if not _is_stopping(self._arrived(control)):
            return 0.0
        begun = time.monotonic()
        self.signal(SIGTSTP)
        try:
            while not _is_continuing(self._arrived(control)):
                continue
        finally:
            self.signal(SIGCONT)  # A stopped process would not notice the signal that ends it.
        paused = time.monotonic() - begun
        self.paused_seconds += paused
        return paused

    def _last_moment(self, control: int, poll: select.poll) -> float:
        """How long an ending command may go on by the signals that have arrived, in seconds of the monotonic clock.

        Effect: an ended guard's pipe is no longer polled.
        """
        was_interrupted, numbers = self._interrupted, self._read_control(control)
        if was_interrupted and SIGINT in numbers:
            return 0.0
        if numbers:
            return math.inf
        poll.unregister(control)
        return time.monotonic() + LAST_SECONDS

    def _arrived(self, control: int) -> bytes:
        """The numbers of the signals that arrive next.

        Raises: KeyboardInterrupt if one ends a launch, or none can arrive any more.
        """
        numbers = self._read_control(control)
        if not numbers or not ENDING.isdisjoint(numbers):
            raise KeyboardInterrupt
        return numbers

    def _read_control(self, control: int) -> bytes:
        """The numbers of the signals that arrive next. Effect: remembers a Ctrl-C."""
        numbers = os.read(control, READ_BYTES)
        self._interrupted = self._interrupted or SIGINT in numbers
        return numbers

    def _read(self, fd: int) -> int | None:
        """How many bytes the stream had; 0: it has ended; None: another process has read them. Effect: passes them on.

        The command can open its pipes as this process does, through /proc.
        """
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # What the command has spliced into it cannot be read.
            return 0
        number = self._streams[fd]
        if self._receive and data:
            self._receive[number](data)
        self.tails[number] = (self.tails[number] + data)[-TAIL_BYTES:]
        return len(data)

    def close(self) -> None:
        """Effect: passes on what is left of the output.

        All that the command started has ended, but what runs as another user (a setuid program), which is not waited
        for. A process from outside that has its output open may go on writing.
        """
        self._waiter.join(REMAINS_SECONDS)
        with suppress(ChildProcessError):  # A setuid program is still unreaped, as it could not be killed.
            os.waitpid(self.pid, os.WNOHANG)
        os.close(self._ended)
        if self._starting is not None:
            os.close(self._starting)
        for fd in self._streams:
            left = _unread_bytes(fd)
            while left > 0 and (size := self._read(fd)):
                left -= size
            os.close(fd)


def _unread_bytes(fd: int) -> int:
    """How many bytes are in a pipe. Source: ioctl_pipe(2), FIONREAD."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _is_stopping(numbers: bytes) -> bool:
    """Whether a stop is the last of these signals that stops or continues."""
    return numbers.rfind(SIGTSTP) > numbers.rfind(SIGCONT)


def _is_continuing(numbers: bytes) -> bool:
    return numbers.rfind(SIGCONT) > numbers.rfind(SIGTSTP)
