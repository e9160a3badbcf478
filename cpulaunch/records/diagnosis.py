"""What a diagnosis asks of the worker plugin, passed in one environment variable."""

from __future__ import annotations

import json

from cpulaunch.records.record import fields, record

VARIABLE = "CPULAUNCH_DIAGNOSIS"
"""Holds an encoded DiagnosisRequest. Inherited by all processes that the program starts: any of them may train."""
FIGURES = "figures-"
"""How the names of the files with the figures of a process begin, in the folder of the request."""
FETCHES = "fetches-"
"""How the names of the files with the figures of a DataLoader worker begin."""
TRACES = "trace-"
"""How the names of the files with the profiler's trace of a process begin."""


@record
class DiagnosisRequest:
    """What to measure. `steps`: without the profiler, besides those that it sees. `to_end`: let the program finish.

    `folder`: where each process writes its figures; it is private. `trace`: write the profiler's trace too.
    """

    folder: str
    steps: int = 20
    warm_up: int = 5
    phase_seconds: float = 10.0
    """Steps that take longer than this together are enough, but for two."""
    trace: bool = False
    to_end: bool = False


def encode(request: DiagnosisRequest) -> str:
    """The request as a JSON object."""
    return json.dumps({name: getattr(request, name) for name in fields(DiagnosisRequest)})


def decode(text: str) -> DiagnosisRequest:
    """The request in the text that `encode` wrote. Raises: ValueError or TypeError."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    known = fields(DiagnosisRequest)
    return DiagnosisRequest(**{name: value for name, value in values.items() if name in known})
