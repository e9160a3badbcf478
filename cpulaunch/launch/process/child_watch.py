"""Waiting for signals and for the ends of children, also of those that other processes trace."""

from __future__ import annotations

import os
import select
import time

from cpulaunch.launch.process.processes import ExitedChild, endable_children, ended_child, is_child, traced_status
from cpulaunch.system.libc import private_pipe, signal_descriptor
from cpulaunch.system.process_state import all_threads_ended, has_ended_traced, open_pidfd
from cpulaunch.system.signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

MAX_WAIT_SECONDS = float(1 << 20)
"""A wait that poll(2), which takes milliseconds as an int, can express."""

PIPE_BYTES = 1 << 16
"""What a pipe holds. Source: pipe(7)."""

HOLD_SECONDS = 0.3
"""How long a tracer may take to let go of a child that has ended: debuggers and strace do so at once."""

PAUSE_SECONDS = 0.01
"""Between two checks of whether children have ended."""

CHECK_SECONDS = 5.0
"""Between two looks whether the child that is waited for has ended, of which a traced thread is left."""


class ChildWatch:
    """Waits for blocked signals, the urgent ones first, and for the end of one child.

    While a process traces a child, neither SIGCHLD nor waitpid(2) shows the child's end, only its pidfd does. It is
    better than a pipe that closes with the child: other processes can open that too, through /proc. If it traces
    another thread than the first, or holds one at its end, only /proc shows it: that is looked at in between.
    Source: Linux, kernel/exit.c, wait_consider_task and exit_notify; pidfd_open(2), Linux 5.3.
    """

    def __init__(
        self,
        child: int,
        *,
        urgent: Sequence[frozenset[int]],
        others: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """Effect: opens two descriptors, for as long as this process lives.

        `urgent`: sets of signals that are looked for one after the other, as a process can send another one again and
        again: the kernel hands out the lowest number first. `kept`: signals that stay pending after they are returned.
        """
        self._child = child
        self._in_order = (*urgent, others)
        self._kept = kept
        self._all = kept.union(*self._in_order)
        self._end = select.poll()
        self._poll: select.poll | None = None
        pidfd, arrivals = open_pidfd(child), signal_descriptor(self._all)
        if pidfd is not None and arrivals is not None:
            self._end.register(pidfd, select.POLLIN)
            self._poll = select.poll()
            self._poll.register(pidfd, select.POLLIN)
            self._poll.register(arrivals, select.POLLIN)

    def next_signal(self, seconds: float | None = None) -> int | None:
        """The next signal that arrives, SIGCHLD when the child has ended; None if none has, at the latest then."""
        deadline = time.monotonic() + (MAX_WAIT_SECONDS if seconds is None else min(seconds, MAX_WAIT_SECONDS))
        while True:
            left = max(0.0, deadline - time.monotonic())
            number = self._next_within(min(left, CHECK_SECONDS))
            if number is None and self.child_has_ended():
                return signal.SIGCHLD
            if number is not None or left <= CHECK_SECONDS:
                return number

    def _next_within(self, seconds: float) -> int | None:
        if self._poll is not None:
            self._are_ready(self._poll, seconds)
        number = self._first_pending()
        return self._wait_for_signal(seconds) if number is None and self._poll is None else number

    def child_has_ended(self) -> bool:
        """Whether the child has ended, traced or not; where the kernel has no pidfd, only if /proc tells it."""
        return (self._poll is not None and self._are_ready(self._end, 0)) or all_threads_ended(self._child)

    def _are_ready(self, descriptors: select.poll, seconds: float) -> bool:
        """Whether one of the descriptors is readable by then.

        Effect: none is used again if a worker has set the limit of their number to 0. Source: prlimit(2), poll(2).
        """
        try:
            return bool(descriptors.poll(1000 * seconds))
        except OSError:
            self._poll = None
            return False

    def _first_pending(self) -> int | None:
        """The most urgent signal that has arrived; None if none has."""
        if not hasattr(signal, "sigtimedwait"):  # macOS.
            return None
        for numbers in self._in_order:
            info = signal.sigtimedwait(numbers, 0) if numbers else None
            if info is not None:
                return info.si_signo
        return next(iter(self._kept & signal.sigpending()), None)

    def _wait_for_signal(self, seconds: float) -> int | None:
        if not hasattr(signal, "sigtimedwait"):
            number: int | None = signal.sigwait(self._all)
        else:
            info = signal.sigtimedwait(self._all, seconds)
            number = None if info is None else info.si_signo
        if number is not None and number in self._kept and signal.SIGCONT not in signal.sigpending():
            os.kill(os.getpid(), number)
        return number


def wait_for_exit(pid: int) -> int | None:
    """The exit code of a child, or minus the signal that killed it, once it has ended, traced or not.

    None if another thread has reaped it. Leaves it unreaped, so that its pid still names it alone; effect: reaps it
    where the system has no waitid(2).
    """
    pidfd = open_pidfd(pid)
    if pidfd is None:
        return _waited_status(pid)
    end = select.poll()
    end.register(pidfd, select.POLLIN)
    try:
        while True:
            while not (end.poll(1000 * CHECK_SECONDS) or all_threads_ended(pid)):
                continue
            held_until = time.monotonic() + HOLD_SECONDS
            while ended_child(pid) is None and is_child(pid) and time.monotonic() < held_until:
                # Only SIGCHLD tells that the tracer has let go, and the main thread needs that signal.
                time.sleep(HOLD_SECONDS / 30)
            if ended_child(pid) is not None or not is_child(pid):
                return _waited_status(pid)
            if has_ended_traced(pid):  # Else a thread of it executed a program, and it seemed to have ended.
                return traced_status(pid)
    finally:
        os.close(pidfd)


def _waited_status(pid: int) -> int | None:
    try:
        if not hasattr(os, "waitid"):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        while (ended := ended_child(pid)) is None:
            # Of a child that this process traces, this wait ends at each stop too.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.status


def child_wakeup_pipe() -> tuple[int, int]:
    """A pipe whose read end, the first, becomes readable when a child ends. Effect: handles and unblocks SIGCHLD."""
    read, write = private_pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Python has written to the pipe already."""

    signal.signal(signal.SIGCHLD, ignore)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return read, write


def drain(fd: int) -> None:
    """Effect: reads what is in a non-blocking pipe, or a part of it: another process may fill it all the time."""
    try:
        os.read(fd, PIPE_BYTES)
    except BlockingIOError:
        return


def wake(fd: int) -> None:
    """Effect: the other end of a non-blocking pipe is readable."""
    try:
        os.write(fd, b"0")
    except BlockingIOError:
        return  # It is full.


class ExitQueue:
    """Ended children, in the order in which they ended.

    waitid(2) alone returns ended children in the order in which they started, and one that another process traces only
    when that lets go of it. So it is where there is no pidfd: before Linux 5.3, on other systems, in a sandbox.
    Source: pidfd_open(2); epoll(7) returns first what became ready first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoll = select.epoll() if hasattr(os, "pidfd_open") else None
        self._clock = clock
        self._pid_of: dict[int, int] = {}
        self._held: dict[int, float] = {}
        """Children that have ended and are traced, and until when their tracers may let go of them."""

    @property
    def fd(self) -> int | None:
        """A descriptor that is readable once an added child has ended, traced or not."""
        return None if self._epoll is None else self._epoll.fileno()

    @property
    def deadline(self) -> float | None:
        """When `first` returns a child that a tracer holds (seconds of the clock); None: never."""
        return min(self._held.values(), default=None)

    def add(self, pid: int) -> None:
        """Effect: records when this child ends, relative to the others."""
        if self._epoll is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
            self._epoll.register(pidfd, select.EPOLLIN)
            self._pid_of[pidfd] = pid
        except OSError:
            return

    def close(self) -> None:
        """Effect: closes all descriptors."""
        for pidfd in self._pid_of:
            os.close(pidfd)
        self._pid_of.clear()
        if self._epoll is not None:
            self._epoll.close()

    def look(self) -> None:
        """Effect: finds added children whose ends their descriptors do not show, as a thread of them is traced."""
        for pidfd, pid in list(self._pid_of.items()):
            if self._epoll is not None and all_threads_ended(pid) and ended_child(pid) is None:
                self._hold(self._remove(self._epoll, pidfd))

    def _hold(self, pid: int) -> None:
        self._held[pid] = self._clock() + HOLD_SECONDS

    def first(self) -> ExitedChild | None:
        """The added child that ended first, else any other child that has ended; None if none has.

        One that a tracer holds is returned after HOLD_SECONDS, and once more when the tracer has let go of it.
        """
        ended = ended_child()
        while self._epoll is not None and (ready := self._epoll.poll(0, 1)):
            pid = self._remove(self._epoll, ready[0][0])
            child = ended_child(pid)
            if child is not None:
                return child
            if is_child(pid):
                self._hold(pid)
        if ended is not None:
            self._held.pop(ended.pid, None)
            return ended
        return self._overdue()

    def _remove(self, epoll: select.epoll, pidfd: int) -> int:
        """The pid of a child that has ended. Effect: closes its pidfd."""
        epoll.unregister(pidfd)
        os.close(pidfd)
        return self._pid_of.pop(pidfd)

    def _overdue(self) -> ExitedChild | None:
        """A child that has ended, and that its tracer does not let go of; None if there is none."""
        now = self._clock()
        for pid in [pid for pid, until in self._held.items() if until <= now]:
            del self._held[pid]
            if has_ended_traced(pid):
                return ExitedChild(pid=pid, status=traced_status(pid), unreaped=False)
            self.add(pid)  # While a thread of it executed a program, it seemed to have ended.
        return None


def await_ends(seconds: float, spared: frozenset[int]) -> None:
    """Effect: waits until all children but those `spared` have ended, at most so many seconds; reaps none.

    Does not wait for setuid programs that run as another user.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not _have_ended(endable_children() - spared, spared):
        time.sleep(PAUSE_SECONDS)  # No descriptor tells of children that others leave to this process meanwhile.


def has_exited(spared: frozenset[int]) -> bool:
    """Whether a child but those `spared` has ended by itself, not by a signal. Reaps none."""
    ended = [ended_child(pid) for pid in endable_children() - spared]
    return any(child is not None and child.status >= 0 for child in ended)


def _have_ended(children: frozenset[int], spared: frozenset[int]) -> bool:
    """Whether these children have ended, and none of them has left another one since they were listed."""
    return all(map(_has_ended, children)) and endable_children() - spared == children


def _has_ended(pid: int) -> bool:
    return ended_child(pid) is not None or has_ended_traced(pid)
