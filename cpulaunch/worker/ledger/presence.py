"""When the wrapper of calls is taken away for a while: where all calls run plain, and are so short that it shows.

A wrapper costs each call of a module, also of parts of a model, what a Python function costs: up to a tenth of a call
of a few microseconds. It leaves only where no other mode has paid for any call so far, so that nothing is lost and
nothing depends on it; a program may change, so it comes back.
"""

from __future__ import annotations

import os
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from time import sleep

PASS_SECONDS = 0.6e-6
"""What the wrapper costs a call that it only counts, and each call of a part in it. Measured on EPYC, Zen 4."""

SHARE = 0.01
"""Share of the time that the wrapper takes, from which on it is taken away."""

WINDOW_SECONDS, FIRST_WINDOWS, LAST_WINDOWS = 0.25, 8, 4096
"""So many windows in turn must have been of plain calls alone: twice as many each time that others come after one."""

FIRST_ABSENCE, GROWTH, LAST_ABSENCE = 1.0, 1.1, 600.0
"""Seconds of an absence. With this growth, calls that could be faster wait for a tenth of a program's time at most."""

RETRY_SECONDS = 1.0
"""After so many seconds it is tried again to bring it back, where the program has put a function of its own there."""

MAX_ABSENCES = 400
"""CPython 3.13 looks up attributes of a class more slowly once the class has changed 1,000 times."""


class Presence:
    """Whether the wrapper is there. `take` removes it, `put` brings it back, and each returns whether it did.

    The time in `look` is that of the caller's clock, in seconds.
    """

    def __init__(self, take: Callable[[], bool], put: Callable[[], bool]) -> None:
        self._take, self._put = take, put
        self._passes, self._has_others = 0, False
        self._since: float | None = None
        self._windows, self._needed = 0, FIRST_WINDOWS
        self.absences = 0
        self._is_away, self._may_leave = False, True
        self._is_returning = False
        self._seconds = FIRST_ABSENCE
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _return(reference))

    def count(self, calls: int, parts: int) -> None:
        """Effect: counts plain calls of a module with so many parts, itself included."""
        self._passes += calls * parts

    def see_other(self) -> None:
        """Effect: notes a call for which the wrapper must be there, as another mode may pay."""
        self._has_others = True

    def stay(self) -> None:
        """Effect: the wrapper does not leave any more."""
        self._may_leave = False

    def look(self, now: float) -> None:
        """Effect: takes the wrapper away if it is time; called at plain calls that are looked at."""
        since = self._since  # Read once, as another thread may leave meanwhile.
        if since is None:
            self._passes, self._since, self._has_others = 0, now, False
            return
        elapsed = now - since
        if elapsed < WINDOW_SECONDS:
            return
        is_costly = not self._has_others and self._passes * PASS_SECONDS > SHARE * elapsed
        if self._has_others and self.absences > 0:
            self._needed, self._seconds = min(2 * self._needed, LAST_WINDOWS), FIRST_ABSENCE
        self._windows = self._windows + 1 if is_costly else 0
        self._passes, self._since, self._has_others = 0, now, False
        if self._windows >= self._needed and self._may_leave and self.absences < MAX_ABSENCES and _has_threads():
            self._leave()

    def _leave(self) -> None:
        if not self._take():
            return
        self.absences += 1
        self._is_away, self._windows, self._since = True, self._needed - 1, None
        self._start_waiting(self._seconds)
        self._seconds = min(GROWTH * self._seconds, LAST_ABSENCE)

    def come_back(self) -> bool:
        """Whether the wrapper is there. Effect: brings it back."""
        if self._is_away:
            self._is_returning, self._is_away = True, False  # Before it is there, as it may leave again at once.
            if not self._put():
                self._is_away = True
            self._is_returning = False
        return not self._is_away

    def return_in_child(self) -> None:
        """Effect: in a forked child, which has none of the other threads, the wrapper is there."""
        if self._is_returning:  # In one of them, which may not have put it there yet.
            self._is_returning, self._is_away = False, True
        if not self.come_back():
            self._start_waiting(RETRY_SECONDS)

    def _start_waiting(self, seconds: float) -> None:
        try:
            start_new_thread(self._wait, (seconds,))
        except RuntimeError:  # The system allows no more threads.
            self.come_back()

    def _wait(self, seconds: float) -> None:
        while True:
            sleep(seconds)  # There is nothing to wait for: calls are to be looked at again some time.
            if self.come_back():
                return
            seconds = RETRY_SECONDS


def _has_threads() -> bool:
    """Whether the process has other threads anyway: Python warns of a fork beside threads."""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return False


def _return(reference: weakref.ref[Presence]) -> None:
    presence = reference()
    if presence is not None:
        presence.return_in_child()
