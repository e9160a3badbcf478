"""A calibration as text for a person and as JSON."""

from collections.abc import Iterator
from typing import Any

from cpulaunch.records.errors import escaped
from cpulaunch.records.host import UNITS, Calibration, Host

TITLES = {
    "products": "matrix products",
    "read bandwidth": "read bandwidth",
    "allocation": "making a tensor",
    "parallel operation": "parallel operation",
    "all-reduce": "all-reduce, 2 ranks",
}


def calibration_json(calibration: Calibration, host: Host) -> dict[str, Any]:
    """The calibration as JSON-ready data, schema 1."""
    return {
        "schema": 1,
        "cpu": host.cpu.model_name,
        "torch": None if host.torch is None else host.torch.version,
        **figures_json(calibration),
        "failures": list(calibration.failures),
    }


def figures_json(calibration: Calibration) -> dict[str, Any]:
    """The figures and their date."""
    figures = [
        {"kind": each.kind, "subject": each.subject, "value": float(f"{each.value:.4g}"), "unit": each.unit}
        for each in calibration.figures
    ]
    return {"date": calibration.date, "disturbed": calibration.disturbed, "figures": figures}


def calibration_text(calibration: Calibration, host: Host) -> str:
    """The machine and its figures, a line for each kind."""
    torch = "" if host.torch is None else f", torch {host.torch.version}"
    busy = ", while other work ran" if calibration.disturbed else ""
    heading = f"{host.cpu.model_name or host.arch}{torch}, measured {calibration.date}{busy}"
    return "\n".join(map(escaped, [heading, *(f"  {line}" for line in calibration_lines(calibration))]))


def calibration_lines(calibration: Calibration) -> Iterator[str]:
    """A line for each kind of figure."""
    for kind, unit in UNITS.items():
        values = [f"{each.subject} {each.value:,.4g}" for each in calibration.figures if each.kind == kind]
        if values:
            yield f"{TITLES[kind]:20}{' · '.join(values)} {unit}"
