"""Waiting for signals and for the end of one child, also of one that another process traces."""

from __future__ import annotations

import os
import select
import signal

from cpulaunch.system.libc import signal_descriptor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_WAIT_SECONDS = float(1 << 20)
"""A wait that poll(2), which takes milliseconds as an int, can express."""


class ChildWatch:
    """Waits for blocked signals, the urgent ones first, and for the end of one child.

    While a process traces a child, neither SIGCHLD nor waitpid(2) shows the child's end, only its pidfd does. It is
    better than a pipe that closes with the child: other processes can open that too, through /proc.
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
        self._in_order = (*urgent, others)
        self._kept = kept
        self._all = kept.union(*self._in_order)
        self._end = select.poll()
        self._poll: select.poll | None = None
        pidfd, arrivals = _child_descriptor(child), signal_descriptor(self._all)
        if pidfd is not None and arrivals is not None:
            self._end.register(pidfd, select.POLLIN)
            self._poll = select.poll()
            self._poll.register(pidfd, select.POLLIN)
            self._poll.register(arrivals, select.POLLIN)

    def next_signal(self, seconds: float | None = None) -> int | None:
        """The next signal that arrives, SIGCHLD when the child has ended; None if none has, at the latest then."""
        if self._poll is None:
            return self._first_pending() or self._wait_for_signal(seconds)
        self._poll.poll(1000 * MAX_WAIT_SECONDS if seconds is None else 1000 * min(seconds, MAX_WAIT_SECONDS))
        number = self._first_pending()
        return signal.SIGCHLD if number is None and self.child_has_ended() else number

    def child_has_ended(self) -> bool:
        """Whether the child has ended, traced or not; False where the kernel has no pidfd."""
        return self._poll is not None and bool(self._end.poll(0))

    def _first_pending(self) -> int | None:
        """The most urgent signal that has arrived; None if none has."""
        if not hasattr(signal, "sigtimedwait"):  # macOS.
            return None
        for numbers in self._in_order:
            info = signal.sigtimedwait(numbers, 0) if numbers else None
            if info is not None:
                return info.si_signo
        return next(iter(self._kept & signal.sigpending()), None)

    def _wait_for_signal(self, seconds: float | None) -> int | None:
        if seconds is None or not hasattr(signal, "sigtimedwait"):
            number: int | None = signal.sigwait(self._all)
        else:
            info = signal.sigtimedwait(self._all, min(seconds, MAX_WAIT_SECONDS))
            number = None if info is None else info.si_signo
        if number is not None and number in self._kept and signal.SIGCONT not in signal.sigpending():
            os.kill(os.getpid(), number)
        return number


def _child_descriptor(child: int) -> int | None:
    """The child's pidfd; None where there is none: before Linux 5.3, in a sandbox, without a free descriptor."""
    try:
        return os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None
