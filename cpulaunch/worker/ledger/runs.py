"""Calls that are measured, and runs of calls that are not, because the mode for them is chosen."""

from __future__ import annotations

from typing import Any

FIRST_RUN, LAST_RUN = 16, 1024
"""Calls of a module for which a mode is chosen that run without being measured: doubled after each measured one."""

RUN_SECONDS, OTHER_RUN_SECONDS = 2.0, 0.05
"""Calls that run without being measured take no longer than this in total, in plain and in another mode.

In another mode, only short calls gain from not being measured, and a change must be noticed sooner.
"""

LONG_CALL, LONG_CALL_SECONDS = 3.0, 1e-3
"""A call in a plain run that takes longer than expected by this factor, and by so many seconds, ends the run: it may be
of another signature, for which another mode may be far faster."""

FULL_RUN_CALLS = 256
"""After a plain run that ended as expected, one call of so many is measured besides the next one: slower calls, of
another signature, may have been among them."""

FIRST_SLACK, LAST_SLACK = 1.5, 96.0
"""A run in another mode, or of training steps, whose durations are those between calls, ends once it takes longer than
expected by this factor, as some of it may have been of another signature. LAST_RUN steps after it are measured, as far
as MEASURING_SHARE allows. The factor is doubled each time until a choice changes, and from the second time on, a share
of as many steps as in the run is measured that is halved each time: a program may wait between its calls.
"""


class Turn:
    """One call that is being measured: what it was chosen for, and in which mode it runs."""

    __slots__ = ("entry", "is_step", "mode", "signature")

    def __init__(self, entry: Any, signature: Any, mode: str, *, is_step: bool) -> None:
        self.entry, self.signature, self.mode, self.is_step = entry, signature, mode, is_step

    def spend(self, seconds: float) -> None:
        """Effect: counts what it has cost to measure this call."""
        self.entry.ledger.account.measuring += seconds


class UnmeasuredRun:
    """Calls of a module that run in a mode without being measured: those with its training mode and gradients.

    `left` is counted down by the wrapper of calls, which also ends the run at the time `until`, or after a call of more
    than `longest` seconds; see module_calls.
    `chosen`: the signatures for which the mode is chosen; None if there is no other mode.
    """

    __slots__ = ("chosen", "left", "longest", "mode", "signature", "size", "until")

    def __init__(
        self, mode: str, size: int, signature: Any, *, until: float = float("inf"), chosen: frozenset[Any] | None = None
    ) -> None:
        self.mode = mode
        self.size = self.left = size
        self.signature = signature
        self.until, self.longest = until, float("inf")
        self.chosen = chosen
