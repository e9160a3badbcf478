"""Calls that are measured, and runs of calls that are not, because the mode for them is chosen."""

from __future__ import annotations

from typing import Any

FIRST_RUN, LAST_RUN = 16, 1024
"""Calls of a module for which a mode is chosen that run without being measured: doubled after each measured one."""

RUN_SECONDS, OTHER_RUN_SECONDS = 2.0, 0.05
"""Calls that run without being measured take no longer than this in total, in plain and in another mode.

In another mode, only short calls gain from not being measured, and a change must be noticed sooner.
"""

SHORT_RUN_SECONDS = 0.25
"""Runs of short plain calls may be longer than LAST_RUN calls, up to so many seconds."""

SHORT_SECONDS, TIMED_CALLS = 100e-6, 8
"""Of plain calls that take less than this many seconds, in runs of FULL_RUN_CALLS or more, one of so many is timed on
average: at random, as the program's longer calls may have any period."""

FULL_RUN_CALLS = 256
"""After a plain run that took no longer than expected, one call of so many is measured besides the next one: longer
calls, of another signature, may have been among them. After a run of more than LAST_RUN calls, as many are measured as
after one of LAST_RUN.
"""

FIRST_SLACK, LAST_SLACK = 1.5, 96.0
"""A run that takes longer than expected by this factor ends, as some of it may have been of another signature, and
LAST_RUN calls after a plain one are measured, as far as MEASURING_SHARE allows. The factor is doubled each time until a
choice changes, and from the second time on, a share of as many calls as in the run is measured that is halved each
time. What a plain run takes is the sum of its calls; only runs that are looked at, and those of training steps, include
the time between calls, in which a program may wait.
"""

LATE_CALLS = 64
"""Calls of known signatures with which a plain run ends that has taken longer than expected: those of others, whose
share in it is unknown, are measured meanwhile."""


class Turn:
    """One call that is being measured: what it was chosen for, and in which mode it runs."""

    __slots__ = ("entry", "is_step", "mode", "signature")

    def __init__(self, entry: Any, signature: Any, mode: str, *, is_step: bool) -> None:
        self.entry, self.signature, self.mode, self.is_step = entry, signature, mode, is_step

    def spend(self, seconds: float) -> None:
        """Effect: counts what it has cost to measure this call, if its duration counts too."""
        if self.signature is not None:
            self.entry.ledger.account.measuring += seconds


class UnmeasuredRun:
    """Calls of a module that run in a mode without being measured: those with its training mode and gradients.

    `left` is counted down by the wrapper of calls, as is `seconds`, by the durations of the calls; the run also ends at
    the time `until`. Calls are not timed while `left` is more than `next_timed`, as two looks at the clock would be a
    share of a short call: fewer than `spread` of them follow a timed one. See module_calls. `chosen`: the signatures
    for which the mode is chosen; None if there is no other mode.
    """

    __slots__ = ("chosen", "left", "mode", "next_timed", "seconds", "signature", "size", "spread", "until")

    def __init__(
        self, mode: str, size: int, signature: Any, *, until: float = float("inf"), chosen: frozenset[Any] | None = None
    ) -> None:
        self.mode = mode
        self.size = self.left = self.next_timed = size
        self.signature = signature
        self.until, self.seconds = until, float("inf")
        self.spread = 0
        self.chosen = chosen

    def holds(self, signature: Any) -> bool:
        """Whether calls of this signature are in the run."""
        return signature[0] == self.signature[0] if self.chosen is None else signature in self.chosen

    def limit(self, typical: float, slack: float) -> None:
        """Effect: the run also ends once its calls have taken `slack` times as long as so many `typical` ones, or less
        if it is longer than LAST_RUN calls: a change is then noticed up to SHORT_RUN_SECONDS later.
        """
        seconds = typical * (FIRST_SLACK * self.size + (slack - FIRST_SLACK) * min(self.size, LAST_RUN))
        is_short = typical < SHORT_SECONDS and self.size >= FULL_RUN_CALLS
        self.spread = 2 * TIMED_CALLS - 1 if is_short else 0
        self.seconds = seconds / TIMED_CALLS if is_short else seconds

    def end_soon(self) -> None:
        """Effect: the run ends after at most LATE_CALLS further calls, each of which is looked at."""
        if self.left > LATE_CALLS:
            self.size, self.left = self.size - self.left + LATE_CALLS, LATE_CALLS
        self.spread, self.next_timed = 0, self.left
