"""The durations of a module's calls in one mode."""

from __future__ import annotations

from collections import deque

WINDOW = 12
"""Durations that count: older ones are of a time when the machine or the program may have been in another state."""

WARM_UP = 1
"""Calls of a mode that are not counted: they make primitives, fill caches and allocate memory."""

COLD_CALLS, COLD_SECONDS = 8, 0.005
"""After calls in another mode so many are not counted if they are as short as that: they read weights that those of the
other mode have displaced from the caches, which takes several times as long. Longer calls read most from memory."""

MIN_SPREAD = 3
"""Fewer durations say nothing about the noise."""

MAX_SPREAD = 0.1
"""Distance of the median to the lower quartile, as a share of it, that is noise; more is a burst of other work."""

UNCERTAINTY = 2.0
"""The lower quartile's standard error in units of its distance to the median over the root of n."""


class Samples:
    """The last WINDOW durations of one mode, in seconds, without its first WARM_UP calls and those of cold caches.

    `shortest` is the shortest duration of all, in a warm-up too: one disturbed call does not make a mode hopeless.
    """

    __slots__ = ("_cold", "_recent", "_to_skip", "count", "shortest")

    def __init__(self, *, warm_up: int = WARM_UP) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._to_skip = warm_up
        self._cold = COLD_CALLS if warm_up else 0
        self.count = 0
        self.shortest = float("inf")

    def resume(self) -> None:
        """Effect: the next calls come after calls in another mode."""
        self._cold = COLD_CALLS

    def settle(self, calls: int) -> None:
        """Effect: so many calls in the mode were not measured."""
        self._cold = max(0, self._cold - calls)

    def add(self, seconds: float) -> None:
        """Effect: counts the duration, unless it is of a warm-up."""
        self.shortest = min(self.shortest, seconds)
        if self._to_skip:
            self._to_skip -= 1
            return
        if self._cold and seconds < COLD_SECONDS:
            self._cold -= 1
            return
        self._cold = 0
        self._recent.append(seconds)
        self.count += 1

    def estimate(self) -> float:
        """The typical duration of an undisturbed call, in seconds: the lower quartile; infinite without samples.

        Other processes on the machine only make a call longer, so that the shorter durations are the reliable ones.
        """
        if not self._recent:
            return float("inf")
        return sorted(self._recent)[(len(self._recent) - 1) // 4]

    def uncertainty(self) -> float:
        """The error to be expected of `estimate`, in seconds; 0 for less than MIN_SPREAD samples.

        For normally distributed noise it is about the standard error, scaled from the distance to the median.
        """
        number, typical = len(self._recent), self.estimate()
        if number < MIN_SPREAD:
            return 0.0
        spread = min(sorted(self._recent)[number // 2] - typical, MAX_SPREAD * typical)
        return spread * UNCERTAINTY / float(number**0.5)
