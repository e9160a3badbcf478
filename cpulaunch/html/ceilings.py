"""What the machine can do at most, as `cpulaunch calibrate` measured it, and the share of it that programs reached."""

from __future__ import annotations

import re

from cpulaunch.charts.model import Bar, is_drawable
from cpulaunch.html.elements.bars import bar_chart
from cpulaunch.html.elements.markup import Markup, element, number_text, table, value_of
from cpulaunch.html.page import section
from cpulaunch.records.host import UNITS
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cpulaunch.records.host import Calibration, CalibrationFigure

CEILINGS = {"products": "Matrix products", "read bandwidth": "Reading memory"}
RATES = {
    "products": re.compile(r"(?<![A-Za-z])([KMGTP]?)(i?)FLOPs?(?:/s|(?<=[Ss]))(?![A-Za-z])", re.IGNORECASE),
    "read bandwidth": re.compile(r"(?<![A-Za-z])([KMGTPkmgtp]?)([iI]?)B/[sS](?:ec)?(?![A-Za-z])"),
}
"""How metrics are named that have the unit of a ceiling, with another prefix at most: "GFLOP/s", "TFLOPS", "GiB/s".

A small b is a bit.
"""
PREFIXES = " KMGTP"
GIGA = 1e9
"""The ceilings' units: GFLOP/s, GB/s."""


@record
class RateFigure:
    """A metric that a program reported. `label`: of the launch."""

    label: str
    metric: str
    value: object


def ceilings(calibration: Calibration | None, figures: Sequence[RateFigure] = ()) -> Markup:
    """The highest rates, and the shares of them that metrics of the same unit reached; nothing if none were measured.

    No share is claimed for other metrics: nothing counts the operations of a program.
    """
    if calibration is None:
        return Markup()
    charts = []
    for kind, title in CEILINGS.items():
        unit = UNITS[kind]
        bars = [Bar(label=each.subject, value=each.value, unit=unit) for each in _of_kind(calibration, kind)]
        if bars:
            charts.append(bar_chart(f"{title}, {unit}", bars))
    if not charts:
        return Markup()
    rows = [row for figure in figures for row in _shares(calibration, figure)]
    heads = ("Launch", "Metric", "Reached", "Share", "Of")
    shares = table("Shares of these rates", heads, rows, numeric=(2, 3))
    return section(
        "What this machine can do", element("p", _note(calibration, bool(rows)), _class="note"), shares, *charts
    )


def _of_kind(calibration: Calibration, kind: str) -> list[CalibrationFigure]:
    return [each for each in calibration.figures if each.kind == kind]


def _note(calibration: Calibration, has_shares: bool) -> str:
    busy = " Other work ran meanwhile, so the true ceilings are higher." if calibration.disturbed else ""
    counted = (
        "The shares are those of rates that the program reported itself."
        if has_shares
        else "The operations of the program are not counted, so no share of these rates is claimed; a program that "
        'reports "GFLOP/s" or "GB/s" with cpulaunch.metric() gets one.'
    )
    return f"Measured here on {calibration.date} by cpulaunch calibrate, on all usable cores.{busy} {counted}"


def _shares(calibration: Calibration, figure: RateFigure) -> Iterable[list[object]]:
    """A row for each ceiling of the metric's unit; none for a metric of another one."""
    if not is_drawable(figure.value) or not isinstance(figure.value, int | float):
        return
    for kind, pattern in RATES.items():
        found = pattern.search(figure.metric)
        if found is None:
            continue
        base = 1024.0 if found[2] else 1000.0
        rate = figure.value * base ** max(0, PREFIXES.index(found[1].upper() or " ")) / GIGA
        for ceiling in _of_kind(calibration, kind):
            if ceiling.value > 0:
                reached = f"{number_text(rate)} {UNITS[kind]}"
                of = f"{CEILINGS[kind].lower()}, {ceiling.subject}: {number_text(ceiling.value)} {UNITS[kind]}"
                yield [value_of(figure.label), value_of(figure.metric), reached, f"{rate / ceiling.value:.0%}", of]
