"""One chart on matplotlib's axes."""

from __future__ import annotations

from cpulaunch.charts.model import MAX_BARS, is_drawable
from cpulaunch.charts.scale import horizontal_scale, vertical_scale
from cpulaunch.records.errors import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.charts.model import BarChart, PointChart, Series

COLOURS = ("#5b6b7b", "#0b62b8", "#c2500a", "#0a7d5e", "#8a3c91", "#7a6200")
MARKERS = ("o", "s", "D")
BAR, BEST, GRID, TEXT = "#7b93ac", "#0b62b8", "#e1e6ea", "#1f2933"
BAR_INCHES, POINTS_INCHES, TITLE_INCHES = 0.34, 2.6, 0.45
MAX_TEXT, MAX_LABEL = 110, 40
STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cpulaunch",
    "font.size": 9,
    "font.family": ["sans-serif"],
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": TEXT,
}
"""matplotlib's own defaults with these changes apply, whatever a user's matplotlibrc says; `$` is no formula."""


def draw_bars(axes: Any, chart: BarChart) -> None:
    """Effect: the axes show the bars, the first one on top."""
    bars = [each for each in chart.bars[:MAX_BARS] if is_drawable(each.value)]
    places = range(len(bars))
    colours = [BEST if each.best else BAR for each in bars]
    axes.barh(places, [each.value for each in bars], height=0.62, color=colours)
    for place, each in enumerate(bars):
        if each.low is not None and each.high is not None and is_drawable(each.low) and is_drawable(each.high):
            axes.plot([each.low, each.high], [place, place], color=TEXT, linewidth=1.4, marker="|", markersize=8)
    axes.set_yticks(places, [_cut(each.label, MAX_LABEL) for each in bars])
    axes.invert_yaxis()
    axes.grid(axis="x")
    if chart.reference is not None:
        axes.axvline(chart.reference, color=TEXT, linewidth=0.9, linestyle="--")
    axes.set_title(_cut(chart.title, MAX_TEXT))


def draw_points(axes: Any, chart: PointChart) -> None:
    """Effect: the axes show the series on the scale that a page has."""
    across, up = horizontal_scale(chart), vertical_scale(chart)
    if up.logarithmic:
        axes.set_yscale("log")
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    for name, scale, whole in (("yticks", up, False), ("xticks", across, True)):
        labelled = scale.labelled(whole=whole)
        getattr(axes, f"set_{name}")([each for each, _ in labelled], [text for _, text in labelled])
        getattr(axes, f"set_{name}")([], minor=True)
    axes.grid(axis="y")
    if chart.band is not None:
        axes.axhspan(*chart.band, color=COLOURS[1], alpha=0.14, linewidth=0, label="95 % interval")
    if chart.reference is not None:
        axes.axhline(chart.reference, color=TEXT, linewidth=0.9, linestyle="--")
    for number, series in enumerate(chart.series):
        _draw_series(axes, series, number, marks=chart.marks)
    for index, lost in enumerate(chart.lost):
        axes.plot([lost.x], [up.low], "x", color="#b3261e", clip_on=False, label="" if index else "failed")
    axes.set_xlabel(chart.x_title)
    axes.set_title(_cut(chart.title, MAX_TEXT))
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _draw_series(axes: Any, series: Series, number: int, *, marks: str) -> None:
    points, colour = series.shown, COLOURS[number % len(COLOURS)]
    places, figures = [each.x for each in points], [each.y for each in points]
    label = _cut(series.label, MAX_LABEL)
    if series.joined:
        axes.plot(places, figures, color=colour, alpha=0.5, linewidth=1.2, label="" if series.dots else label)
    if series.steps:
        axes.step(places, figures, where="post", color=colour, linewidth=1.2, label="" if series.dots else label)
    if series.trend is not None and points:
        axes.plot([places[0], places[-1]], series.trend, color=colour, linewidth=1.2, linestyle="--")
    if not series.dots:
        return
    for marked in (False, True):
        some = [each for each in points if each.marked is marked]
        if not some:
            continue
        name = f"{label}, {marks}" if marked and marks else label
        axes.plot(
            [each.x for each in some],
            [each.y for each in some],
            MARKERS[number % len(MARKERS)],
            color=colour,
            markersize=4.5,
            markerfacecolor="none" if marked else colour,
            label=name,
        )


def _cut(text: str, limit: int) -> str:
    """The text without control characters. One with a leading underscore would be left out of a legend."""
    shown = escaped(text)
    shown = shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown
