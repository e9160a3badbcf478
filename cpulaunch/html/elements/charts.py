"""Charts of any kind as elements of a page."""

from __future__ import annotations

from cpulaunch.charts.model import BarChart
from cpulaunch.html.elements.bars import bar_chart
from cpulaunch.html.elements.points import point_chart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpulaunch.charts.model import Chart
    from cpulaunch.html.elements.markup import Markup


def drawn_charts(charts: Iterable[Chart]) -> list[Markup]:
    """The charts, one after another."""
    return [
        bar_chart(each.title, each.bars, reference=each.reference) if isinstance(each, BarChart) else point_chart(each)
        for each in charts
    ]
