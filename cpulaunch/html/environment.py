"""What the environment of the workers is beside that of the launch: variables that the plan sets and removes."""

from __future__ import annotations

from cpulaunch.html.elements.markup import Markup, code, element, table, value_of
from cpulaunch.html.page import section
from cpulaunch.records.cpulist import format_cpulist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Json = Mapping[str, Any]

MAX_VALUES = 32
"""Values of one variable that are shown."""


def environment_section(plan: Json) -> Markup:
    """The variables with their values and reasons; a value that differs is shown for each worker."""
    reasons = {note["setting"]: note["reason"] for note in plan["notes"]}
    names = dict.fromkeys(name for worker in plan["workers"] for name in worker["env"])
    rows = [[code(name), _value(name, plan["workers"]), value_of(reasons.get(name, ""))] for name in names]
    caption = "Variables that differ from the environment of the launch"
    return section("Environment", table(caption, ("Variable", "Value in the workers", "Reason"), rows))


def _value(name: str, workers: Iterable[Json]) -> Markup:
    values: dict[str | None, list[int]] = {}
    for worker in workers:
        values.setdefault(worker["env"].get(name), []).append(worker["index"])
    if len(values) == 1:
        return _text(next(iter(values)))
    lines: list[tuple[object, ...]] = [
        (f"{_workers_text(found)}: ", _text(value)) for value, found in list(values.items())[:MAX_VALUES]
    ]
    if len(values) > MAX_VALUES:
        lines.append((f"{len(values) - MAX_VALUES:,} more values are left out",))
    return element("div", *(element("div", *line) for line in lines))


def _workers_text(indexes: list[int]) -> str:
    return f"worker{'s' * (len(indexes) > 1)} {format_cpulist(indexes)}"


def _text(value: str | None) -> Markup:
    return element("em", "removed") if value is None else code(value)
