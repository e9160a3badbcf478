"""What the plugin did to a worker's modules: the documented fields of its events, and lines for the terminal."""

from __future__ import annotations

import json

from cpulaunch.records.errors import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cpulaunch.launch.monitor.worker_report import WorkerReport

CHOSEN_FIELDS = ("module", "signature", "mode", "speedup", "samples")
WEIGHTS_FIELDS = (
    *("module", "type", "layers", "kinds", "bytes_before", "bytes_after", "bytes_released"),
    *("layer_error_max", "layer_error_rms"),
    *("error_max", "error_rms", "argmax_agreement", "kept", "reason"),
)
_SUMMED = ("layers", "bytes_before", "bytes_after", "bytes_released")
_LARGEST = ("layer_error_max", "layer_error_rms", "error_max", "error_rms")
MAX_KINDS = 64
"""Types of weights that are counted; torch has fewer."""
MAX_KEPT = 64
"""Layers of a module that the report names as kept in a higher type."""
MAX_MODES = 16
"""Modes that the terminal shows; there are fewer."""
_WORD_LENGTH = 20
"""The names of modes and types are shorter. The events may be those of any process, and hold anything."""


def graph_report(report: WorkerReport) -> dict[str, Any]:
    """The captures of a worker, and the seconds that they took."""
    seconds, budgets = (
        [each[name] for each in report.captures.values() if _is_number(each.get(name))]
        for name in ("seconds", "budget")
    )
    return {
        "captured": list(report.captured),
        "eager": list(report.eager),
        "frozen_bytes": sum(int(_number(module.get("frozen_bytes"))) for module in report.captured),
        "seconds": round(sum(seconds), 3) if seconds else None,
        "budget_seconds": max(budgets, default=None),
    }


def chosen_report(report: WorkerReport) -> list[dict[str, Any]]:
    """The mode chosen for each module and signature: the last choice."""
    last = {(str(each.get("module")), str(each.get("signature"))): each for each in report.chosen}
    return [{name: each.get(name) for name in CHOSEN_FIELDS} for each in last.values()]


def weights_report(report: WorkerReport) -> list[dict[str, Any]]:
    """The weights that each module keeps in another type; the events of one process about one module are merged."""
    merged: dict[tuple[object, ...], dict[str, Any]] = {}
    for each in report.weights:
        key = (each.get("pid"), str(each.get("module")), str(each.get("type")))
        merged[key] = _merged(merged.get(key, {}), each)
    entries = [{name: facts.get(name) for name in WEIGHTS_FIELDS} for facts in merged.values()]
    unique = {json.dumps(entry, sort_keys=True): entry for entry in entries}  # Every process of a worker may report it.
    return list(unique.values())


def _merged(before: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of several events about one module: sums, the largest errors, the smallest agreement, or the last."""
    after = {name: event[name] for name in WEIGHTS_FIELDS if name in event}
    after["kinds"] = _sums(before.get("kinds"), event.get("kinds"))
    after["kept"] = [*_list(before.get("kept")), *_list(event.get("kept"))][:MAX_KEPT]
    for names, join in ((_SUMMED, sum), (_LARGEST, max), (("argmax_agreement",), min)):
        for name in names:
            known = [each[name] for each in (before, event) if _is_number(each.get(name))]
            after[name] = join(known) if known else None
    return {**before, **after}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _sums(*counts: object) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in counts:
        for name, count in (each if isinstance(each, dict) else {}).items():
            if name in total or len(total) < MAX_KINDS:
                total[name] = total.get(name, 0) + _number(count)
    return total


def module_lines(reports: Iterable[WorkerReport]) -> tuple[str, ...]:
    """A line on the modes of all workers' modules and one on their weights; none where nothing was reported."""
    known = list(reports)
    calls = _modes([each for report in known for each in chosen_report(report)])
    kinds = _sums(*(each["kinds"] for report in known for each in weights_report(report)))
    lines = [f"modules: {calls}"] if calls else []
    if kinds:
        lines.append("weights: " + ", ".join(f"{count:g} in {_word(kind)}" for kind, count in kinds.items()))
    return tuple(lines)


def _modes(chosen: Sequence[Mapping[str, Any]]) -> str:
    """The number of choices of each mode, with the range of their speed-ups over plain calls."""
    speedups: dict[str, list[object]] = {}
    for each in chosen:
        speedups.setdefault(_word(each["mode"]), []).append(each["speedup"])
    texts = [f"{len(values)} {mode}{_range(mode, values)}" for mode, values in speedups.items()]
    left = [f"and {len(texts) - MAX_MODES} more modes"] if len(texts) > MAX_MODES else []
    return ", ".join([*texts[:MAX_MODES], *left])


def _word(value: object) -> str:
    return escaped(str(value)[:_WORD_LENGTH])


def _range(mode: str, speedups: Sequence[object]) -> str:
    """The smallest and the largest speed-up in brackets; empty for plain calls and if none is known."""
    numbers = [_number(each) for each in speedups if _is_number(each)]
    if mode == "plain" or not numbers:
        return ""
    first, last = f"{min(numbers):.2f}", f"{max(numbers):.2f}"
    return f" ({first if first == last else f'{first}-{last}'} times plain)"
