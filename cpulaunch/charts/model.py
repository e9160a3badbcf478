"""Charts as data, with no word on how they are drawn."""

from __future__ import annotations

from math import isfinite

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Chart: TypeAlias = "BarChart | PointChart"

MAX_BARS = 64
MAX_POINTS = 500
"""Points of one series that are drawn: its last ones."""


@record
class Bar:
    """A figure, and the interval it is known to lie in if there is one. `best`: drawn in the accent colour."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    best: bool = False


@record
class BarChart:
    """Bars from zero on one scale. `reference`: a value with a line of its own, such as 1 among ratios."""

    title: str
    bars: tuple[Bar, ...]
    reference: float | None = None


@record
class Point:
    """A figure at a round or trial. `marked`: drawn hollow. `text`: what is worth knowing of it."""

    x: float
    y: float
    text: str = ""
    marked: bool = False


@record
class LostPoint:
    """A round or trial that yielded no figure, and why."""

    x: float
    text: str


@record
class Series:
    """Points of one thing. `trend`: its line's figures at the first and last point. `joined`: a line through them.

    `steps`: the line keeps its height until the next point. `dots`: whether the points themselves are drawn.
    """

    label: str
    points: tuple[Point, ...]
    trend: tuple[float, float] | None = None
    joined: bool = False
    steps: bool = False
    dots: bool = True

    @property
    def shown(self) -> tuple[Point, ...]:
        """The points that can be drawn: numbers, and not too many."""
        return tuple(point for point in self.points if is_drawable(point.y))[-MAX_POINTS:]


@record
class PointChart:
    """Series over rounds or trials. `band`: an interval of figures that is shaded; `reference`: a line at a figure.

    `marks`: what the hollow points are. `lost`: shown as crosses at the lower edge.
    """

    title: str
    x_title: str
    series: tuple[Series, ...]
    band: tuple[float, float] | None = None
    reference: float | None = None
    marks: str = ""
    lost: tuple[LostPoint, ...] = ()


def is_drawable(value: object) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False
