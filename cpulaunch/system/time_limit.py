"""A limit on the CPU time of code that may take for ever, such as a regular expression that backtracks."""

from __future__ import annotations

import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

NUMBER = int(getattr(signal, "SIGVTALRM", 0))
"""Not SIGALRM, which counts time: on a busy machine it would end what is only waiting for a CPU."""


class OutOfTimeError(Exception):
    """The code took more CPU time than it may."""


class cpu_time_limit:  # noqa: N801
    """A context that raises OutOfTimeError once its code has taken `seconds` of CPU time; for the main thread only.

    Source: setitimer(2), ITIMER_VIRTUAL. Python's regular expressions check for signals while they match.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running = False

    def __enter__(self) -> None:
        self._handler = signal.signal(NUMBER, self._expire)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {NUMBER})
        self._end = time.thread_time() + self._seconds
        self._running = True  # Last: another process may send the signal at any time.
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(NUMBER, self._handler)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        try:
            if not self._running:
                return  # The time ran out as the code ended.
            left = self._end - time.thread_time()
            if left > 0:  # Another process has sent the signal, or the timer counts whole ticks.
                signal.setitimer(signal.ITIMER_VIRTUAL, left)
                return
        except RecursionError:  # Another process sends it faster than it is handled, and each one interrupts this.
            return
        self._running = False
        raise OutOfTimeError
