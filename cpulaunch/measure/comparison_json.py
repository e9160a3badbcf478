"""A comparison as JSON data, schema 1. Pure."""

from __future__ import annotations

from statistics import median

from cpulaunch.measure.comparison_text import metric_label, remarks, verdict_text
from cpulaunch.measure.statistics import drift, spread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cpulaunch.measure.comparison import ComparisonLimits, ComparisonResult, Round
    from cpulaunch.measure.samples import Disturbance, MetricChoice, Sample

DECIMALS = 6


def comparison_json(
    comparison: ComparisonResult, limits: ComparisonLimits, *, program: Sequence[str], version: str, host: str
) -> dict[str, Any]:
    """All of a comparison."""
    return {
        "schema": 1,
        "cpulaunch": version,
        "host": host,
        "program": list(program),
        "metric": None if comparison.choice is None else _metric(comparison.choice),
        "limits": {"until": limits.until, "rounds": limits.rounds, "budget_seconds": limits.budget_seconds},
        "ended": comparison.ended,
        "seconds": _rounded(comparison.seconds),
        "sides": [_side(comparison, number) for number in range(len(comparison.sides))],
        "remarks": list(remarks(comparison, limits)),
        "comparisons": [_estimate(comparison, number) for number in range(1, len(comparison.estimates) + 1)],
        "rounds": [_round(each) for each in comparison.rounds],
        "failures": [
            {
                "side": each.side,
                "round": each.number,
                "text": each.sample.failure,
                "exit_code": each.sample.exit_code,
            }
            for each in comparison.failures
        ],
    }


def _metric(choice: MetricChoice) -> dict[str, Any]:
    source = "output" if choice.pattern is not None else "wall time" if choice.name is None else "program"
    return {"name": metric_label(choice), "source": source, "lower_is_better": choice.lower_is_better}


def _side(comparison: ComparisonResult, number: int) -> dict[str, Any]:
    side, values = comparison.sides[number], comparison.values(number)
    change = drift(values)
    first = comparison.warm_up[number] if number < len(comparison.warm_up) else None
    return {
        "label": side.label,
        "plain": side.plain,
        "median": median(values) if values else None,
        "spread": _rounded(spread(values)) if values else None,
        "drift": None if change is None else _rounded(change),
        "metrics": {} if first is None else dict(first.metrics),
        "plan": None if first is None or first.report is None else first.report.get("plan"),
        "workers": _workers(comparison, number),
    }


def _workers(comparison: ComparisonResult, number: int) -> list[Any]:
    """The workers of a side's last launch, as its report has them; none without a report."""
    samples = [
        each[number] for each in (comparison.warm_up, *(r.samples for r in comparison.rounds)) if number < len(each)
    ]
    reports = [sample.report for sample in samples if sample.report is not None]
    return list(reports[-1].get("workers") or ()) if reports else []


def _estimate(comparison: ComparisonResult, number: int) -> dict[str, Any]:
    found = comparison.estimates[number - 1]
    return {
        "side": number,
        "to": 0,
        "ratio": _rounded(found.ratio),
        "low": None if found.low is None else _rounded(found.low),
        "high": None if found.high is None else _rounded(found.high),
        "rounds": found.rounds,
        "verdict": comparison.verdict(number),
        "text": verdict_text(comparison, number),
    }


def _round(each: Round) -> dict[str, Any]:
    return {
        "order": list(each.order),
        "samples": [
            {**_sample(sample), "disturbed": list(each.disturbed_by(side))} for side, sample in enumerate(each.samples)
        ],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    return {"value": sample.value, "seconds": _rounded(sample.seconds), **_disturbance(sample.disturbance)}


def _disturbance(disturbance: Disturbance) -> dict[str, Any]:
    return {
        "steal": _rounded(disturbance.steal),
        "other_cpus": _rounded(disturbance.other_cpus),
        "throttled_seconds": _rounded(disturbance.throttled_seconds),
        "thermal_events": disturbance.thermal_events,
        "involuntary_switches": disturbance.involuntary_switches,
    }


def _rounded(value: float) -> float:
    return round(value, DECIMALS)
