"""Which thread's steps are measured: that of the thread that loads torch, or of another one that makes them. Pure."""

from __future__ import annotations

from cpulaunch.worker.diagnosis.marker import FIRST, LOST, RANKS

LEAST_CALLS = 3
"""Of a thread, before its steps are measured, where the measured one has made none."""
SILENT_SECONDS = 2.0
"""Without a call of the measured thread: from then on another one may have taken its place."""
MOST_THREADS = 1000
"""Whose calls are counted: a server may start one for each request."""


class ThreadChoice:
    """Counts the calls of the threads that are not measured, since the last one of the thread that is."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._heard = 0.0

    def heard(self, now: float) -> None:
        """Effect: the measured thread has made a call."""
        self._heard = now
        if self._calls:
            self._calls.clear()

    def takes_over(self, thread: int, kind: str, *, measured: str, now: float) -> bool:
        """Whether the thread that makes this call is measured from now on.

        `measured`: what ends the steps of the measured thread; empty if it made none.
        """
        if len(self._calls) >= MOST_THREADS and thread not in self._calls:
            self._calls.clear()
        count = self._calls[thread] = self._calls.get(thread, 0) + 1
        if not measured:
            return count >= LEAST_CALLS
        if RANKS[kind] != RANKS[measured]:
            return RANKS[kind] > RANKS[measured] and count >= FIRST[kind]
        return count >= LOST and now - self._heard >= SILENT_SECONDS
