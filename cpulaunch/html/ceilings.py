"""What the machine can do at most, as `cpulaunch calibrate` measured it, beside the figures of a run."""

from __future__ import annotations

from cpulaunch.html.bars import Bar, bar_chart
from cpulaunch.html.markup import Markup, element
from cpulaunch.html.page import section
from cpulaunch.records.host import UNITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.records.host import Calibration

CEILINGS = {"products": "Matrix products", "read bandwidth": "Reading memory"}


def ceilings(calibration: Calibration | None) -> Markup:
    """The highest rates; nothing if none were measured. No share of them is claimed: nothing counted the work."""
    if calibration is None:
        return Markup()
    charts = []
    for kind, title in CEILINGS.items():
        unit = UNITS[kind]
        bars = [
            Bar(label=each.subject, value=each.value, unit=unit) for each in calibration.figures if each.kind == kind
        ]
        if bars:
            charts.append(bar_chart(f"{title}, {unit}", bars))
    busy = " Other work ran meanwhile, so the true ceilings are higher." if calibration.disturbed else ""
    note = (
        f"Measured here on {calibration.date} by cpulaunch calibrate, on all usable cores.{busy} "
        "The operations of the program are not counted, so no share of these rates is claimed."
    )
    return section("What this machine can do", element("p", note, _class="note"), *charts) if charts else Markup()
