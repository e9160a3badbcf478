"""What the plugin did inside the workers' torch: settings, captures and why not, modes of modules, weights."""

from __future__ import annotations

import json

from cpulaunch.charts.model import Bar
from cpulaunch.html.elements.bars import bar_chart
from cpulaunch.html.elements.markup import Markup, bytes_text, code, element, joined, number_text, table, value_of
from cpulaunch.html.page import folded
from cpulaunch.records.host import count_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Json = Mapping[str, Any]


def torch_parts(workers: Sequence[Json]) -> Iterable[tuple[str, Markup]]:
    """Titles and contents on the workers of a report; what several workers report alike is there once."""
    yield "Settings inside torch", _settings(workers)
    yield "Captured graphs", _captures(workers)
    yield "Modes of modules", _modes(_unique(each for worker in workers for each in worker["chosen"]))
    yield "Packed weights", _weights(_unique(each for worker in workers for each in worker["weights"]))


def _unique(entries: Iterable[Json]) -> list[tuple[Json, int]]:
    """The different entries, each with how often it is there."""
    counts: dict[str, tuple[Json, int]] = {}
    for entry in entries:
        key = json.dumps(entry, sort_keys=True)
        counts[key] = (entry, counts.get(key, (entry, 0))[1] + 1)
    return list(counts.values())


def _settings(workers: Sequence[Json]) -> Markup:
    found = _unique({"name": name, **end} for worker in workers for name, end in worker["settings"].items())
    rows = [
        [code(each["name"]), value_of(each["state"]), value_of(each["detail"]), f"{count} of {len(workers)}"]
        for each, count in found
    ]
    heads = ("Setting", "State", "How, or why not", "Workers")
    return table("As the workers report them", heads, rows)


def _captures(workers: Sequence[Json]) -> Markup:
    """Captured modules with their speed-ups, and below them the modules that stayed eager, with the reasons."""
    captured = _unique(each for worker in workers for each in worker["graph"]["captured"])
    eager = _unique(each for worker in workers for each in worker["graph"]["eager"])
    if not captured and not eager:
        return Markup()
    summary = f"{count_text(len(captured), 'graph')} captured; {count_text(len(eager), 'module')} stayed eager."
    bars = [
        Bar(label=str(each.get("module")), value=each["speedup"], unit="times eager")
        for each, _ in captured
        if _is_number(each.get("speedup"))
    ]
    heads = ("Module", "Inputs", "Engine", "Seconds", "Largest difference")
    rows = [
        [
            code(each.get("module")),
            code(each.get("signature")),
            value_of(each.get("engine")),
            number_text(each.get("seconds")),
            number_text(each.get("error")) or "not compared",
        ]
        for each, _ in captured
    ]
    reasons = [[code(each.get("module")), value_of(each.get("reason"))] for each, _ in eager]
    chart = bar_chart("Speed when it was captured; 1 is as fast as eager", bars, reference=1.0) if bars else Markup()
    return joined(
        [
            element("p", summary),
            chart,
            folded("Captured modules", table("Captured modules", heads, rows, numeric=(3, 4))),
            table("Modules that stayed eager, and why", ("Module", "Reason"), reasons),
        ]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _modes(found: Sequence[tuple[Json, int]]) -> Markup:
    rows = [
        [
            code(each["module"]),
            code(each["signature"]),
            value_of(each["mode"]),
            number_text(each["speedup"]) or "not known",
            value_of(", ".join(f"{count} {mode}" for mode, count in _items(each["samples"]))),
        ]
        for each, _ in found
    ]
    heads = ("Module", "Inputs", "Mode", "Times plain calls", "Timed calls")
    caption = "The mode chosen for each module by its durations"
    return table(caption, heads, rows, numeric=(3,))


def _items(value: object) -> Iterable[tuple[object, object]]:
    return value.items() if isinstance(value, dict) else ()


def _weights(found: Sequence[tuple[Json, int]]) -> Markup:
    rows = [
        [
            code(each["module"]),
            value_of(each["type"]),
            value_of(", ".join(f"{number_text(count)} {kind}" for kind, count in _items(each["kinds"]))),
            bytes_text(each["bytes_before"]),
            bytes_text(each["bytes_after"]),
            number_text(each["error_max"]) or value_of(each["reason"] or "not compared"),
        ]
        for each, _ in found
    ]
    heads = ("Module", "Type", "Layers", "Before", "Packed", "Largest error of results")
    return table("Weights kept in another type", heads, rows, numeric=(3, 4))
