"""What is known about the captures of one module: which signatures have one, cannot have one, or are waiting."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from cpulaunch.worker.graph.capture import Call, Captured
from cpulaunch.worker.graph.weights import Weights
from cpulaunch.worker.reporting.events import report_event

Key = tuple[Any, ...]
"""A signature: equal for calls that may share a capture; see key_of."""

MAX_KEYS = 64
"""Signatures that are remembered as seen once; the oldest is forgotten."""

FRUITLESS_KEYS = 8
"""A submodule that was called with so many signatures runs eagerly from then on if hardly any of them came again."""

MIN_RECURRING = 0.25
"""The share of a submodule's calls whose signature must have come before."""

MAX_DRAWS = 4
"""A module in whose calls so often random numbers were drawn draws them itself, although other threads might have."""

FIRST_PAUSE, LAST_PAUSE, LAST_ASKING_PAUSE = 0.25, 8.0, 1.0
"""Seconds before a capture that is pending is tried again: doubled each time, up to the second.

Up to the third while its graph is being tried: to ask for the outcome takes some 2 ms, and a program that has it sooner
saves more. A helper that has starved is replaced when it is asked, too.
"""


class ModuleState:
    """The state of one module.

    `try_submodules`: its submodules may be captured. `finished`: it runs eagerly from now on.
    By signature: `captures` are in use; `refused` cannot be captured, but submodules may be; `not_used` gain nothing
    from a capture. `recent` is the capture used last. `bounded` and `unbounded` count the runs of graphs that gave a
    result, and those in vain because a value inside was NaN, infinite or huge, or an assertion did not hold.
    `eager_seconds`: of its eager calls that might have been captured.
    """

    def __init__(self, module: nn.Module, *, outermost: bool) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.outermost = outermost
        self.captures: dict[Key, list[Captured]] = {}
        self.recent: tuple[Key, Captured] | None = None
        self.verified: dict[int, int] = {}
        self.refused: set[Key] = set()
        self.not_used: set[Key] = set()
        self.weights: Weights | None = None
        self.bytes = 0
        self.changes = 0
        self.calls_to_wait = 0
        self.bounded, self.unbounded = 0, 0
        self.eager_seconds = 0.0
        self.try_submodules = False
        self.finished = False
        self._seen: dict[Key, float] = {}
        self._first_seen, self._seen_again = 0, 0
        self._pending: dict[Key, tuple[float, float]] = {}
        self._draws = 0
        self._reasons: set[str] = set()

    def is_settled(self, key: Key, call: Call) -> bool:
        """Whether the call has a capture, or will have none."""
        if self.finished or key in self.refused or key in self.not_used:
            return True
        return any(captured.holds(call) for captured in self.captures.get(key, ()))

    def limit_reason(self, limit: int) -> str | None:
        """Why no further signature is captured: captures and failures are limited each; None if none is reached."""
        if sum(map(len, self.captures.values())) >= limit:
            return f"it is called with more than {limit} signatures"
        if len(self.refused) + len(self.not_used) >= limit:
            return f"{limit} of its signatures gain nothing from a capture"
        return None

    def must_wait(self, key: Key) -> bool:
        """Whether this call runs eagerly although its signature may be captured later. Effect: counts the call.

        A signature is captured at its second call: the first result of a program is not delayed, and signatures that
        never come again, as those of a growing cache, are not captured. After a change of weights some calls run
        eagerly, twice as many each time, because more changes may follow.
        """
        if self.calls_to_wait:
            self.calls_to_wait -= 1
            return True
        return self._is_first(key)

    def add_eager(self, key: Key | None, seconds: float) -> None:
        """Effect: counts the duration of an eager call, with this signature if there is one."""
        self.eager_seconds += seconds
        shortest = None if key is None else self._seen.get(key)
        if key is not None and shortest is not None:
            self._seen[key] = min(shortest, seconds)

    def shortest(self, key: Key) -> float:
        """The shortest duration of eager calls with this signature, in seconds; 0 if none is remembered."""
        seconds = self._seen.get(key, float("inf"))
        return seconds if seconds < float("inf") else 0.0

    def is_pending(self, key: Key, now: float) -> bool:
        """Whether the capture of this signature is in preparation, and not to be tried again yet. `now`: in seconds."""
        return key in self._pending and now < self._pending[key][0]

    def _is_first(self, key: Key) -> bool:
        if key in self.captures:
            return False
        if key in self._seen:
            self._seen_again += 1
            return False
        self._seen[key] = float("inf")
        self._first_seen += 1
        if len(self._seen) > MAX_KEYS:
            del self._seen[next(iter(self._seen))]
        if not self.outermost and self._is_fruitless():
            self.finish(f"it is called with other arguments nearly every time ({self._first_seen} signatures)")
        return True

    def _is_fruitless(self) -> bool:
        """Whether captures of this submodule would hardly ever be used."""
        calls = self._first_seen + self._seen_again
        return not self.captures and self._first_seen > FRUITLESS_KEYS and self._seen_again < MIN_RECURRING * calls

    def postpone(self, key: Key, now: float, *, longest: float = LAST_PAUSE) -> None:
        """Effect: the capture of this signature is tried again after a pause, twice as long each time.

        `longest`: limit for the pause, in seconds.
        """
        pause = min(self._pending.pop(key, (0.0, FIRST_PAUSE))[1], longest)
        if len(self._pending) >= MAX_KEYS:
            del self._pending[next(iter(self._pending))]
        self._pending[key] = (now + pause, min(2 * pause, LAST_PAUSE))

    def may_be_others_draws(self) -> bool:
        """Whether numbers drawn during a call of the module may be another thread's. Effect: counts the call."""
        self._draws += 1
        return self._draws < MAX_DRAWS

    def drop(self) -> None:
        """Effect: drops all captures of the module."""
        self.recent = None
        self.captures.clear()
        self.not_used.clear()
        self.verified.clear()
        self.weights = None
        self.bytes = 0
        self.calls_to_wait = 1 << self.changes

    def record_reason(self, reason: str) -> bool:
        """Whether the reason is new. Effect: reports a new reason."""
        if reason in self._reasons:
            return False
        self._reasons.add(reason)
        report_event("eager", module=self.name, reason=reason)
        return True

    def finish(self, reason: str) -> bool:
        """Whether the reason is new. Effect: the module runs eagerly from now on."""
        self.finished = True
        return self.record_reason(reason)
