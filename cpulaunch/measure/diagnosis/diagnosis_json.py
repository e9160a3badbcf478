"""A diagnosis as JSON data, schema 1. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.advice import ADVICE
from cpulaunch.measure.diagnosis.diagnosis import overhead, sentence
from cpulaunch.measure.diagnosis.diagnosis_text import LABELS, first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cpulaunch.measure.diagnosis.bottlenecks import Bottleneck, ProcessDiagnosis
    from cpulaunch.measure.diagnosis.diagnosis import Diagnosis

DECIMALS = 6


def diagnosis_json(found: Diagnosis, *, program: Sequence[str], version: str, host: str) -> dict[str, Any]:
    """All of a diagnosis."""
    return {
        "schema": 1,
        "cpulaunch": version,
        "host": host,
        "program": list(program),
        "verdict": first_line(found),
        "first": _bottleneck(found, found.first),
        "second": _bottleneck(found, found.second),
        "rates": {name: _rounded(value) for name, value in found.rates.items()},
        "processes": [_process(each) for each in found.processes],
        "remarks": list(found.remarks),
    }


def _bottleneck(diagnosis: Diagnosis, found: Bottleneck | None) -> dict[str, Any] | None:
    if found is None:
        return None
    advice = ADVICE[found.kind]
    return {
        "kind": found.kind,
        "name": advice.name,
        "share": _rounded(found.share),
        "speedup_at_most": _rounded(found.speedup),
        "place": found.place,
        "process": found.process,
        "option": advice.option,
        "rule": advice.rule or None,
        "text": sentence(found, diagnosis.seconds(found)),
    }


def _process(process: ProcessDiagnosis) -> dict[str, Any]:
    figures, shares = process.figures, process.shares
    added = overhead(process)
    return {
        "index": figures.index,
        "rank": figures.rank,
        "pid": figures.pid,
        "step": figures.step,
        "steps": figures.steps,
        "step_seconds": _rounded(shares.seconds),
        "profiled_steps": figures.profiled_steps,
        "examined_steps": _rounded(figures.examined_steps),
        "examined_seconds": _rounded(float((figures.window or {}).get("seconds", 0.0))),
        "profiler_overhead": None if added is None else _rounded(added),
        "threads": figures.threads,
        "shares": {name: _rounded(getattr(shares, name)) for name in LABELS},
        "other_programs": _rounded(shares.others),
        "loader_bytes": figures.loader_bytes,
        "page_faults": _rounded(figures.sum("thread_minflt") / max(1, figures.steps)),
        "operations": [
            {"name": str(name), "count": int(count), "seconds": _rounded(float(spent))}
            for name, count, spent in (figures.window or {}).get("operations", [])
        ],
    }


def _rounded(value: float) -> float:
    return round(value, DECIMALS)
