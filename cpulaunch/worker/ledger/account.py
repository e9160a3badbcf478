"""The time of a module's calls, and how much of it trying modes may cost."""

from __future__ import annotations

SHARE = 0.01
"""The share of the time of a module's calls that later trials of modes may cost."""

MEASURING_SHARE = 0.02
"""The share of the time of a module's calls that further measuring of calls whose mode is chosen may cost."""

START_UPS = 4
"""Signatures of a module whose first samples are free; further ones are sampled from the share, when it allows."""


class Account:
    """Seconds of a module's calls, seconds by which tried modes exceeded the chosen one, and seconds of measuring.

    What measuring costs is not in the durations of plain calls. Of a call of milliseconds it may be 5 %, as what it
    needs is not in the CPU's caches any more.
    """

    __slots__ = ("_start_ups", "measuring", "spent", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.spent = 0.0
        self.measuring = 0.0
        self._start_ups: dict[tuple[str, ...], int] = {}

    def credit(self, ranks: int = 1) -> float:
        """Seconds that trials may cost now, in each of so many ranks."""
        return SHARE / ranks * self.total - self.spent

    def may_measure(self) -> bool:
        """Whether a call may be measured now, besides those that are sampled."""
        return self.measuring < MEASURING_SHARE * self.total

    def add(self, seconds: float, *, excess: float = 0.0) -> None:
        """Effect: counts a call, and the seconds by which it exceeded one in the chosen mode."""
        self.total += seconds
        self.spent += max(0.0, excess)

    def is_first(self, modes: tuple[str, ...]) -> bool:
        """Whether no signature with these modes has taken its first samples yet."""
        return modes not in self._start_ups

    def has_start_up(self, modes: tuple[str, ...]) -> bool:
        """Whether one more signature with these modes could take its first samples for free."""
        return self._start_ups.get(modes, 0) < START_UPS

    def start_up(self, modes: tuple[str, ...]) -> bool:
        """Whether one more signature with these modes may take its first samples for free. Effect: counts it."""
        number = self._start_ups[modes] = self._start_ups.get(modes, 0) + 1
        return number <= START_UPS
