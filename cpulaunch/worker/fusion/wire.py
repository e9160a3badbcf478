"""What the worker and its helper process send each other: lines of JSON. It imports no torch."""

from __future__ import annotations

import json
from typing import Any

from cpulaunch.records.record import record
from cpulaunch.worker.fusion.search import TrialOutcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.worker.fusion.portable import PortableGraph


@record
class Request:
    """A graph to compile in a process of `threads` threads; `seconds`: limit for all attempts together.

    `left_out`: positions of operations that must not be fused. `math`: the settings to try it with.
    """

    key: str
    left_out: frozenset[int]
    graph: PortableGraph
    threads: int
    math: dict[str, Any]
    seconds: float


def encode_request(request: Request, described: list[Any]) -> bytes:
    """The request as one line; `described` are its constants and inputs as `describe` returns them."""
    fields = {
        "key": request.key,
        "text": request.graph.text,
        "inputs": request.graph.inputs,
        "left_out": sorted(request.left_out),
        "values": described,
        "threads": request.threads,
        "math": request.math,
        "seconds": request.seconds,
    }
    return json.dumps(fields).encode() + b"\n"


def decode_request(line: bytes) -> tuple[dict[str, Any], list[Any]]:
    """The fields of a request, and its values still as JSON. Raises: ValueError, KeyError."""
    fields = json.loads(line)
    return fields, fields["values"]


def encode_outcome(key: str, outcome: TrialOutcome) -> bytes:
    """The outcome about the request of this key, as one line."""
    fields = {
        "key": key,
        "left_out": sorted(outcome.left_out),
        "refusal": outcome.refusal,
        "lasting": outcome.lasting,
        "seconds": outcome.seconds,
        "cut_after": outcome.cut_after,
    }
    return json.dumps(fields).encode() + b"\n"


def decode_outcome(line: bytes) -> tuple[str, TrialOutcome]:
    """The key of a request, and the outcome about it. Raises: ValueError, KeyError, TypeError."""
    fields = json.loads(line)
    left_out = frozenset(map(int, fields["left_out"]))
    return fields["key"], TrialOutcome(
        left_out=left_out,
        refusal=fields["refusal"],
        lasting=bool(fields["lasting"]),
        seconds=float(fields["seconds"]),
        cut_after=float(fields["cut_after"]),
    )
