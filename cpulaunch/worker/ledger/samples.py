"""The durations of a module's calls in one mode."""

from __future__ import annotations

from collections import deque

WINDOW = 12
"""Durations that count: older ones are of a time when the machine or the program may have been in another state."""

WARM_UP = 1
"""Calls of a mode that are not counted: they make primitives, fill caches and allocate memory."""

SHORT_SECONDS = 0.02
"""Of shorter calls one says little: while another process has the CPU, any mode takes several times as long."""

COLD_CALLS, SETTLED_CALLS, SETTLED = 8, 2, 0.9
"""After calls in another mode, short ones are not counted until so many of them took at least this share of the
shortest before, and at most COLD_CALLS: they read weights that those of the other mode have displaced from the caches,
which takes several times as long. Longer calls read most from memory anyway."""

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

    __slots__ = ("_cold", "_least", "_recent", "_settled", "_to_skip", "_typical", "count", "shortest")

    def __init__(self, *, warm_up: int = WARM_UP, cold: int = COLD_CALLS) -> None:
        """`cold`: how many short calls are not counted besides; none if durations are means of many calls."""
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._to_skip = warm_up
        self._cold, self._settled, self._least = cold, 0, float("inf")
        self.count = 0
        self.shortest = self._typical = float("inf")

    def resume(self) -> None:
        """Effect: the next calls come after calls in another mode."""
        self._cold, self._settled, self._least = COLD_CALLS, 0, float("inf")

    def settle(self, calls: int) -> None:
        """Effect: so many calls in the mode were not measured."""
        self._cold = max(0, self._cold - calls)

    def add(self, seconds: float) -> None:
        """Effect: counts the duration, unless it is of a warm-up."""
        self.shortest = min(self.shortest, seconds)
        if self._to_skip:
            self._to_skip -= 1
            return
        if self._cold and self._is_cold(seconds):
            self._cold -= 1
            return
        self._cold = 0
        self._recent.append(seconds)
        self._typical = sorted(self._recent)[(len(self._recent) - 1) // 4]
        self.count += 1

    def _is_cold(self, seconds: float) -> bool:
        """Whether a call may have been that long only because of the caches. Effect: counts it if it was not."""
        self._settled += seconds >= SETTLED * self._least
        self._least = min(self._least, seconds)
        return seconds < SHORT_SECONDS and self._settled < SETTLED_CALLS

    def estimate(self) -> float:
        """The typical duration of an undisturbed call, in seconds: the lower quartile; infinite without samples.

        Other processes on the machine only make a call longer, so that the shorter durations are the reliable ones.
        """
        return self._typical

    def uncertainty(self) -> float:
        """The error to be expected of `estimate`, in seconds; 0 for less than MIN_SPREAD samples.

        For normally distributed noise it is about the standard error, scaled from the distance to the median.
        """
        number, typical = len(self._recent), self.estimate()
        if number < MIN_SPREAD:
            return 0.0
        spread = min(sorted(self._recent)[number // 2] - typical, MAX_SPREAD * typical)
        return spread * UNCERTAINTY / float(number**0.5)
