"""The charts of a comparison, from its JSON."""

from __future__ import annotations

import math
from statistics import median

from cpulaunch.charts.model import Bar, BarChart, LostPoint, Point, PointChart, Series, is_drawable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cpulaunch.charts.model import Chart

    Json = Mapping[str, Any]

ROUND = "round"
FEWEST_FOR_TREND = 2


def compare_charts(comparison: Json) -> tuple[Chart, ...]:
    """The ratios of the sides, the figures of all rounds, and the ratio of each round; those that have content."""
    if comparison["metric"] is None or not comparison["rounds"]:
        return ()
    return (ratio_chart(comparison), samples_chart(comparison), *round_ratios(comparison))


def ratio_chart(comparison: Json) -> BarChart:
    """How many times as good each side is as the first one, with its interval."""
    sides, found = comparison["sides"], comparison["comparisons"]
    best = max((each["ratio"] for each in found if each["verdict"] == "better"), default=None)
    bars = [Bar(label=sides[0]["label"], value=1.0)]
    for each in found:
        label, is_best = sides[each["side"]]["label"], best is not None and each["ratio"] == best
        bars.append(Bar(label=label, value=each["ratio"], low=each["low"], high=each["high"], best=is_best))
    title = f"{_metric_text(comparison)}: how many times as good as {sides[0]['label']}, with 95 % intervals"
    return BarChart(title=title, bars=tuple(bars), reference=1.0)


def samples_chart(comparison: Json) -> PointChart:
    """The figure of each launch; those of disturbed launches are marked, and a side that drifts has its trend."""
    metric = comparison["metric"]
    series = [_samples(comparison, number) for number in range(len(comparison["sides"]))]
    direction = "less" if metric["lower_is_better"] else "more"
    return PointChart(
        title=f"{_metric_text(comparison)} of each launch; {direction} is better",
        x_title=ROUND,
        series=tuple(series),
        marks="disturbed" if any(point.marked for each in series for point in each.points) else "",
        lost=tuple(
            LostPoint(x=float(each["round"]), text=f"{comparison['sides'][each['side']]['label']}: {each['text']}")
            for each in comparison["failures"]
        ),
    )


def round_ratios(comparison: Json) -> Iterable[PointChart]:
    """The ratio of each round for each side but the first, with the interval of the true ratio."""
    sides = comparison["sides"]
    for each in comparison["comparisons"]:
        points = tuple(_ratio_points(comparison, each["side"]))
        ends = (each["low"], each["high"])
        band = ends if all(map(is_drawable, ends)) else None
        yield PointChart(
            title=f"{sides[each['side']]['label']} against {sides[0]['label']}: the ratio of each round",
            x_title=ROUND,
            series=(Series(label="ratio of a round", points=points),),
            band=band,
            reference=1.0,
            marks="disturbed" if any(point.marked for point in points) else "",
        )


def _metric_text(comparison: Json) -> str:
    metric = comparison["metric"]
    return f"{metric['name']} (s)" if metric["source"] == "wall time" else str(metric["name"])


def _samples(comparison: Json, number: int) -> Series:
    side = comparison["sides"][number]
    points = []
    for index, each in enumerate(comparison["rounds"], start=1):
        sample = each["samples"][number]
        text = "; ".join(map(str, sample["disturbed"]))
        points.append(Point(x=float(index), y=sample["value"], text=text, marked=bool(sample["disturbed"])))
    drift = side["drift"]
    label = side["label"] if drift is None else f"{side['label']}: drifts by {drift:+.1%}"
    return Series(label=label, points=tuple(points), trend=_trend([point.y for point in points], drift))


def _trend(values: Sequence[float], drift: float | None) -> tuple[float, float] | None:
    """The trend's figures in the first and last round: a steady relative change, through the middle of the figures."""
    if drift is None or len(values) < FEWEST_FOR_TREND or drift <= -1:
        return None
    last = len(values) - 1
    slope = math.log1p(drift) / last
    logs = [(index, math.log(value)) for index, value in enumerate(values) if is_drawable(value) and value > 0]
    if not logs:
        return None
    start = median(value - slope * index for index, value in logs)
    try:
        return math.exp(start), math.exp(start + slope * last)
    except OverflowError:
        return None


def _ratio_points(comparison: Json, side: int) -> Iterable[Point]:
    lower = comparison["metric"]["lower_is_better"]
    for index, each in enumerate(comparison["rounds"], start=1):
        first, other = each["samples"][0], each["samples"][side]
        if not all(is_drawable(sample["value"]) and sample["value"] > 0 for sample in (first, other)):
            continue
        ratio = first["value"] / other["value"] if lower else other["value"] / first["value"]
        disturbed = dict.fromkeys(map(str, [*first["disturbed"], *other["disturbed"]]))
        yield Point(x=float(index), y=ratio, text="; ".join(disturbed), marked=bool(disturbed))
