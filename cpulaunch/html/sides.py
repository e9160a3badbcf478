"""Launches beside one another: what their settings and environments differ in, their cores, and torch inside each."""

from __future__ import annotations

from cpulaunch.html.elements.markup import Markup, code, element, joined, listed, scrolling, table, value_of
from cpulaunch.html.inside_torch import torch_parts
from cpulaunch.html.page import folded, section, subsection
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cpulaunch.records.host import Calibration

    Json = Mapping[str, Any]

MAX_HEAD = 32
"""Characters of a side's name above a column."""


@record
class PageMachine:
    """The machine of a page: its processor, in a line, and what was measured on it."""

    name: str
    calibration: Calibration | None = None


@record
class PageSide:
    """A launch on a page. `plan`: as JSON; None for Python alone. `core_map`: its picture, as an SVG element.

    `workers`: as a report has them; none where nothing was reported.
    """

    label: str
    plan: Json | None = None
    core_map: str | None = None
    workers: Sequence[Json] = ()


def difference_section(sides: Sequence[PageSide]) -> Markup:
    """The settings and variables that are not the same on all sides; nothing if all are.

    Python alone has no settings, so those of the other sides are compared.
    """
    planned = [side for side in sides if side.plan is not None]
    settings = _rows([_settings(side.plan) for side in planned], missing="not set")
    variables = _rows([_variables(side.plan) for side in sides], missing="as it was")
    reasons = {str(note["setting"]): note["reason"] for side in planned for note in (side.plan or {})["notes"]}
    for rows in (settings, variables):
        for name, row in rows:
            row.append(value_of(reasons.get(name, "")))
    return section(
        "What the sides differ in",
        _table("Settings that differ", "Setting", planned, settings),
        _table("Environment variables that differ", "Variable", sides, variables),
    )


def _table(caption: str, head: str, sides: Sequence[PageSide], rows: Iterable[tuple[str, list[Markup]]]) -> Markup:
    heads = (head, *(_short(side.label) for side in sides), "Reason")
    return table(caption, heads, [[code(name), *cells] for name, cells in rows])


def _short(label: str) -> str:
    return label if len(label) <= MAX_HEAD else f"{label[: MAX_HEAD - 1]}…"


def _settings(plan: Json | None) -> dict[str, str | None]:
    notes = () if plan is None else plan["notes"]
    return {str(note["setting"]): str(note["value"]) for note in notes if str(note["setting"]).islower()}


def _variables(plan: Json | None) -> dict[str, str | None]:
    """The variables that the plan sets, and those that it removes (None), with the values of all workers."""
    found: dict[str, list[str | None]] = {}
    for worker in () if plan is None else plan["workers"]:
        for name, value in worker["env"].items():
            found.setdefault(str(name), []).append(value)
    return {name: _one_text(values) for name, values in found.items()}


def _one_text(values: Sequence[str | None]) -> str | None:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else listed("removed" if each is None else each for each in different)


def _rows(sides: Sequence[Mapping[str, str | None]], *, missing: str) -> list[tuple[str, list[Markup]]]:
    """The names with the cells of all sides, where these differ."""
    rows: list[tuple[str, list[Markup]]] = []
    for name in dict.fromkeys(name for side in sides for name in side):
        cells = [element("em", missing) if name not in side else _value(side[name]) for side in sides]
        if len(set(cells)) > 1:
            rows.append((name, cells))
    return rows


def _value(text: str | None) -> Markup:
    return element("em", "removed") if text is None else code(text)


def core_maps(sides: Sequence[PageSide]) -> Markup:
    """The cores of each side that binds its workers; sides with the same map share it."""
    maps: dict[str, list[str]] = {}
    for side in sides:
        if side.core_map is not None:
            maps.setdefault(side.core_map, []).append(side.label)
    parts = [
        subsection(value_of("; ".join(labels)), scrolling("Map of the cores", Markup(picture)))
        for picture, labels in maps.items()
    ]
    return section("Cores", *parts)


def inside_sides(sides: Sequence[PageSide]) -> Iterable[Markup]:
    """A folded section on each side whose workers reported what torch did."""
    found = []
    for side in sides:
        parts = [subsection(title, content) for title, content in torch_parts(side.workers)]
        content = joined(parts)
        if content:
            found.append(folded(side.label, content, opened=_is_notable(side)))
    yield section("Inside torch", *found)


def _is_notable(side: PageSide) -> bool:
    """Whether a worker changed how a module runs, or could not."""
    return any(
        worker["graph"]["captured"] or worker["graph"]["eager"] or worker["chosen"] or worker["weights"]
        for worker in side.workers
    )
