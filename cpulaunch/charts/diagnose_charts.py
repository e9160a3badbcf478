"""The charts of a diagnosis, from its JSON: the parts of a step, and the ranks' own work."""

from __future__ import annotations

from cpulaunch.charts.model import Bar, BarChart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Json = Mapping[str, Any]

LEAST = 0.001
"""Of a step: parts that take less are not drawn."""


def parts_chart(process: Json, labels: Mapping[str, str], *, best: str | None) -> BarChart:
    """The parts of a step, the longest first, in % of it. `best`: the part in the accent colour."""
    found = sorted(process["shares"].items(), key=lambda item: -item[1])
    bars = tuple(
        Bar(label=labels.get(name, name), value=round(100 * share, 1), unit="%", best=name == best)
        for name, share in found
        if share >= LEAST
    )
    return BarChart(title="Parts of a step's time, %", bars=bars)


def work_chart(processes: Sequence[Json]) -> BarChart | None:
    """The time of a step that each process works and does not wait for others, in ms; None for one process."""
    if len(processes) < 2:
        return None
    bars = tuple(Bar(label=process_name(each), value=1e3 * own_seconds(each), unit="ms") for each in processes)
    return BarChart(title="Time of a step without waiting for other ranks, ms", bars=bars)


def own_seconds(process: Json) -> float:
    """Seconds of a step outside of collectives."""
    return float(process["step_seconds"] * (1 - process["shares"].get("collective", 0.0)))


def process_name(process: Json) -> str:
    """What a process is called: its rank, or its worker and process id."""
    if process["rank"] is not None:
        return f"rank {process['rank']}"
    return f"worker {process['index']}, process {process['pid']}"
