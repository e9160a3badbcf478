"""Where figures lie on an axis, and which round numbers are written beside it."""

from __future__ import annotations

import math

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpulaunch.charts.model import PointChart

WIDE = 20
"""A range whose ends are positive and this many times apart has a logarithmic scale."""
MARGIN = 0.06
"""Of the range, free at both ends."""
MAX_TICKS = 6
LARGEST = 1e250
"""Figures beyond it, which only a mistake makes, have no place of their own."""


@record
class Scale:
    """An axis from `low` to `high`, which differ."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high end; values outside are at the ends."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return min(1.0, max(0.0, (value / 2 - low / 2) / (high / 2 - low / 2)))

    def ticks(self) -> tuple[float, ...]:
        """Round numbers inside the axis, at most MAX_TICKS."""
        found = self._decades() if self.logarithmic else ()
        return found if len(found) > 1 else self._even()

    def labelled(self, *, whole: bool = False) -> tuple[tuple[float, str], ...]:
        """The round numbers with their texts, which differ. `whole`: those of rounds and trials, without halves."""
        ticks = [each for each in self.ticks() if not whole or each == round(each)] or [round(self.low + 0.5)]
        for digits in range(4, 17):
            texts = [_number_text(each, digits) for each in ticks]
            if len(set(texts)) == len(texts):
                break
        return tuple(zip(ticks, texts, strict=True))

    def _decades(self) -> tuple[float, ...]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            inside = [each for each in found if self.low <= each <= self.high]
            if len(inside) <= MAX_TICKS:
                return tuple(inside)
        return tuple(inside[:: math.ceil(len(inside) / MAX_TICKS)])

    def _even(self) -> tuple[float, ...]:
        width = self.high / MAX_TICKS - self.low / MAX_TICKS
        power = 10.0 ** math.floor(math.log10(width))
        step = next((each * power for each in (1, 2, 2.5, 5, 10) if each * power >= width), 10 * power)
        first = math.ceil(self.low / step)
        numbers = (round((first + index) * step, 12 - math.floor(math.log10(step))) for index in range(MAX_TICKS + 1))
        return tuple(each for each in numbers if self.low <= each <= self.high)


def _number_text(value: float, digits: int) -> str:
    large = 1000 <= abs(value) < 1e15 and value == round(value)
    return f"{value:,.0f}" if large else f"{value:.{digits}g}"


def scale_of(values: Iterable[float]) -> Scale:
    """The scale on which all of these finite values lie, with a margin; beyond LARGEST they lie at its ends."""
    found = [min(LARGEST, max(-LARGEST, float(each))) for each in values]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low > 0 and high / WIDE > max(low, 1 / LARGEST):
        low = max(low, 1 / LARGEST)
        margin = math.exp(MARGIN * (math.log(high) - math.log(low)))
        return Scale(low=low / margin, high=high * margin, logarithmic=True)
    room = max((high - low) * MARGIN, abs(high) * 1e-3, abs(low) * 1e-3, 1e-9)
    return Scale(low=low - room, high=high + room)


def vertical_scale(chart: PointChart) -> Scale:
    """The scale of the figures of a chart, its line and its band."""
    values = [point.y for series in chart.series for point in series.shown]
    values += [each for series in chart.series for each in series.trend or ()]
    values += [chart.reference] if chart.reference is not None else []
    return scale_of([*values, *(chart.band or ())])


def horizontal_scale(chart: PointChart) -> Scale:
    """The scale of the rounds or trials of a chart."""
    places = [point.x for series in chart.series for point in series.shown] + [each.x for each in chart.lost]
    low, high = min(places, default=1.0), max(places, default=1.0)
    room = max(0.5, (high - low) * 0.02)
    return Scale(low=low - room, high=high + room)
