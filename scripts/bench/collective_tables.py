"""Pure part of the bench of collectives: which ways a machine has the CPUs for, tables, and how far losses differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interleave import paired_ratios, spread
from report import format_spread, format_table

Times = Mapping[str, Sequence[float]]
NOT_MEASURED = "-"
HEADER = ("gloo", "ccl", "gloo / ccl", "ccl over oneCCL", "C API", "ccl / C API")


def can_spin(size: int, cpus: int) -> bool:
    """Whether each rank has a CPU: oneCCL waits at full speed, and with fewer a call takes seconds."""
    return size <= cpus


def why_not(size: int, cpus: int) -> str:
    return (
        f"not measured: oneCCL, as a path and as the bare C API, with {size} ranks on {cpus} CPUs: its ranks wait at "
        "full speed, and need a CPU each"
    )


def row(name: str, times: Times, unit_seconds: float) -> list[str]:
    """The cells of one measured thing, of those ways that were measured."""

    def cell(way: str) -> str:
        return format_spread(spread([each / unit_seconds for each in times[way]])) if way in times else NOT_MEASURED

    def ratio(way: str, other: str) -> str:
        if way not in times or other not in times:
            return NOT_MEASURED
        return format_spread(spread(paired_ratios(times[way], times[other])))

    return [name, cell("gloo"), cell("ccl"), ratio("gloo", "ccl"), cell("oneccl"), cell("bare"), ratio("ccl", "bare")]


def table(size: int, measured: Mapping[str, Any]) -> str:
    """All that was measured with so many ranks."""
    rows = [row(f"all-reduce {int(each) >> 10} KiB, us", times, 1e-6) for each, times in measured["reduce"].items()]
    rows += [row(f"{name}, us", times, 1e-6) for name, times in measured["others"].items()]
    rows += [row(f"DDP step, width {width}, ms", times, 1e-3) for width, times in measured["step"].items()]
    said = [f"ccl takes its {measured['path']} path; what is not an all-reduce, nor a step, is of 1 MiB"]
    said += [bound(int(width), times) for width, times in measured["step"].items() if "none" in times]
    said += [
        verdict(f"width {width}, {way}", compared)
        for width, by_way in measured["losses"].items()
        for way, compared in by_way.items()
    ]
    return "\n".join([format_table([f"{size} ranks", *HEADER], rows), *said])


def bound(width: int, times: Times) -> str:
    """How much sooner than over gloo a step could be over the best of backends."""
    alone = format_spread(spread([each / 1e-3 for each in times["none"]]))
    ratio = format_spread(spread(paired_ratios(times["gloo"], times["none"])))
    return f"width {width}: a step that exchanges nothing takes {alone} ms: gloo's takes {ratio} times as long"


def verdict(name: str, compared: Mapping[str, float]) -> str:
    """Whether losses are gloo's."""
    steps, difference = int(compared["steps"]), compared["difference"]
    if difference == 0:
        return f"{name}: the losses of {steps} steps are gloo's, bit for bit"
    return f"{name}: the losses of {steps} steps differ from gloo's by up to {difference:.1e} of them"


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference, relative to the expected; 0 only if all are equal, infinite where one is no number."""
    worst = 0.0
    for loss, other in zip(losses, expected, strict=True):
        if loss != other:
            relative = abs(loss - other) / abs(other) if other else float("inf")
            worst = max(worst, relative) if relative == relative else float("inf")
    return worst
