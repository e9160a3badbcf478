"""Two states of a module compared one after the other, because a change of state costs time itself."""

from __future__ import annotations

from typing import Literal

from cpulaunch.worker.ledger.blocks import BLOCK_SECONDS
from cpulaunch.worker.ledger.decision import HOPELESS, MIN_GAIN, START_SECONDS
from cpulaunch.worker.ledger.samples import Samples

NEEDED = 4
"""Samples of each state."""

MAX_CALLS = 256
"""Calls after which the comparison ends without a result, as if the second state were no better."""

Step = Literal["change", "keep", "return"]
"""What to do next: change to the second state; keep it; return to the first one."""


class Comparison:
    """Durations in; when to change the state, and which one to keep, out.

    A sample is the mean of `block` durations, of fewer if they take BLOCK_SECONDS. The second state must save MIN_GAIN;
    after START_SECONDS in it, it is left as soon as it is not faster.
    """

    def __init__(self, *, block: int = 1) -> None:
        self._block = block
        self._sums = [0.0, 0]
        self._samples = (Samples(cold=0), Samples(cold=0))
        self._calls = 0
        self._second_seconds = 0.0
        self.is_second = False

    def add(self, seconds: float) -> Step | None:
        """The next step, if it is time for one. Effect: counts a duration, in seconds, in the present state."""
        if seconds_per_call := self._mean(seconds):
            self._samples[self.is_second].add(seconds_per_call)
        first, second = self.estimates()
        if not self.is_second:
            if self._samples[0].count < NEEDED:
                return None
            self.is_second = True
            return "change"
        self._second_seconds += seconds
        is_long = self._second_seconds > START_SECONDS and first <= self._samples[1].shortest < float("inf")
        if self._samples[1].count >= NEEDED or is_long:
            return "keep" if second <= first * (1 - MIN_GAIN) else "return"
        is_hopeless = self._samples[1].count > 0 and self._samples[1].shortest > HOPELESS * first
        return "return" if is_hopeless else None

    def _mean(self, seconds: float) -> float | None:
        """The mean of a block that is complete with this duration; None if it is not."""
        total, number = self._sums
        self._sums = [total + seconds, number + 1]
        if number + 1 < self._block and total + seconds < BLOCK_SECONDS:
            return None
        self._sums = [0.0, 0]
        return (total + seconds) / (number + 1)

    def pass_by(self) -> Step | None:
        """The next step after a call that cannot be compared or counted: "return" once there were MAX_CALLS."""
        self._calls += 1
        return "return" if self._calls > MAX_CALLS else None

    def estimates(self) -> tuple[float, float]:
        """The typical duration in the first and in the second state, in seconds."""
        return self._samples[0].estimate(), self._samples[1].estimate()
