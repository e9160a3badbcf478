"""The difference of two diagnoses as JSON data, schema 1. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.changes.changes import verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cpulaunch.measure.diagnosis.changes.changes import DiagnosisChange
    from cpulaunch.measure.diagnosis.changes.document import Document

DIGITS = 9


def change_json(found: DiagnosisChange, files: Sequence[str], *, version: str) -> dict[str, Any]:
    """All of it. `files`: the paths of the two diagnoses."""
    return {
        "schema": 1,
        "cpulaunch": version,
        "verdict": verdict(found),
        "speedup": round(found.speedup, DIGITS),
        "before": _document(found.before, files[0]),
        "after": _document(found.after, files[1]),
        "parts": [
            {
                "name": part.name,
                "label": part.label,
                "before_seconds": round(part.before, DIGITS),
                "after_seconds": round(part.after, DIGITS),
                "change_seconds": round(part.seconds, DIGITS),
                "before_share": round(part.before_share, DIGITS),
                "after_share": round(part.after_share, DIGITS),
            }
            for part in found.parts
        ],
        "remarks": list(found.remarks),
    }


def _document(document: Document, path: str) -> dict[str, Any]:
    return {
        "file": path,
        "host": document.host,
        "program": list(document.program),
        "step_seconds": round(document.seconds, DIGITS),
        "processes": document.processes,
        "first": None if document.first is None else {"name": document.first, "share": document.first_share},
    }
