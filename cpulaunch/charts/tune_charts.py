"""The charts of a search for settings, from its JSON."""

from __future__ import annotations

from cpulaunch.charts.model import Bar, BarChart, LostPoint, Point, PointChart, Series, is_drawable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cpulaunch.charts.model import Chart

    Json = Mapping[str, Any]

DEFAULT = "the default"
FEWEST_BASELINES = 2


def tune_charts(search: Json) -> tuple[Chart, ...]:
    """The finalists, all trials, the importance of settings, the final round and the default between trials.

    Those that have content.
    """
    charts = (
        finalists_chart(search),
        trials_chart(search),
        importance_chart(search),
        final_round_chart(search),
        baseline_chart(search),
    )
    return tuple(each for each in charts if each is not None)


def finalists_chart(search: Json) -> BarChart | None:
    """How many times as good as the default each finalist is, with its interval."""
    winner = search["winner"]
    kept = winner["settings"] if winner is not None and winner["confirmed"] else None
    bars = [
        Bar(
            label=options_text(each["options"]),
            value=each["ratio"],
            low=each["low"],
            high=each["high"],
            best=each["settings"] == kept,
        )
        for each in search["final"]["finalists"]
        if is_drawable(each["ratio"])
    ]
    title = f"{metric_text(search)}, final round: how many times as good as {DEFAULT}"
    title += ", with 95 % intervals" if any(bar.low is not None for bar in bars) else ""
    return BarChart(title=title, bars=(Bar(label=DEFAULT, value=1.0), *bars), reference=1.0) if bars else None


def trials_chart(search: Json) -> PointChart | None:
    """Each trial against the default at its time, and the best so far."""
    known = [each for each in search["trials"] if is_drawable(each["ratio"])]
    failed = [each for each in search["trials"] if each["state"] == "failed"]
    if not known and not failed:
        return None
    points = [_trial_point(each) for each in known]
    best, line = 0.0, list[Point]()
    for each, point in zip(known, points, strict=True):
        if each["state"] == "measured" or not line:
            best = max(best, point.y)
        line.append(Point(x=point.x, y=best))
    trial = Series(label="trial", points=tuple(points))
    best_so_far = Series(label="best so far", points=tuple(line), steps=True, dots=False)
    cut = any(point.marked for point in points)
    return PointChart(
        title=f"Trials: how many times as good as {DEFAULT}",
        x_title="trial",
        series=(trial, best_so_far) if points else (),
        reference=1.0,
        marks="measured once" if cut else "",
        lost=tuple(
            LostPoint(x=_place(each), text=f"{options_text(each['options'])}: {each['failure']}") for each in failed
        ),
    )


def _trial_point(trial: Json) -> Point:
    state, text = trial["state"], options_text(trial["options"])
    more = "" if state == "measured" else f": {state}"
    return Point(x=_place(trial), y=trial["ratio"], text=text + more, marked=state in ("cut short", "repeated"))


def _place(trial: Json) -> float:
    """The place of a trial: its number, from 1."""
    return float(trial["number"]) + 1


def importance_chart(search: Json) -> BarChart | None:
    """The settings by how much of the differences between trials they explain."""
    found = [(str(name), value) for name, value in search["importance"].items() if is_drawable(value) and value > 0]
    found.sort(key=lambda each: -each[1])
    bars = [Bar(label=name, value=round(100 * value, 1), unit="%") for name, value in found]
    title = "Importance of settings: their shares of the differences between trials"
    return BarChart(title=title, bars=tuple(bars)) if bars else None


def final_round_chart(search: Json) -> PointChart | None:
    """The figures of the final round, in which the finalists were measured in turn with the default."""
    final = search["final"]
    sides = [(DEFAULT, final["default"]), *((options_text(e["options"]), e["values"]) for e in final["finalists"])]
    series = [Series(label=label, points=_points(values)) for label, values in sides if values]
    title = f"{metric_text(search)} of each launch in the final round{_direction(search)}"
    return PointChart(title=title, x_title="round", series=tuple(series)) if len(series) > 1 else None


def baseline_chart(search: Json) -> PointChart | None:
    """The default between trials, which shows how the machine drifts."""
    points = _points([each["value"] for each in search["baseline"]])
    title = f"{metric_text(search)} of {DEFAULT} between trials{_direction(search)}"
    series = (Series(label=DEFAULT, points=points, joined=True),)
    return PointChart(title=title, x_title="launch", series=series) if len(points) >= FEWEST_BASELINES else None


def _points(values: Sequence[float]) -> tuple[Point, ...]:
    return tuple(Point(x=float(index), y=value) for index, value in enumerate(values, start=1))


def _direction(search: Json) -> str:
    metric = search["metric"]
    return "" if metric is None else f"; {'less' if metric['lower_is_better'] else 'more'} is better"


def metric_text(search: Json) -> str:
    """The name of what is measured, with its unit if that is known."""
    metric = search["metric"]
    if metric is None:
        return "figure"
    return f"{metric['name']} (s)" if metric["source"] == "wall time" else str(metric["name"])


def options_text(options: Iterable[object]) -> str:
    """The options of a configuration, for a person."""
    return " ".join(map(str, options)) or DEFAULT
