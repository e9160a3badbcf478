"""A report whose every text was written by a worker or profile that attacks its reader, and an ordinary one."""

from __future__ import annotations

from typing import Any

ATTACKS = (
    "<script>document.title = 'taken'</script>",
    "</style></script><img src=x onerror=\"document.title = 'taken'\">",
    '" onmouseover="document.title = \'taken\'" x="',
    "\x1b]0;taken\x07\x1b[31mred",
    "safe\u202etxt.exe\u200f\u2066",
    "\ud800\x00\x85 lone surrogate, null",
    "long " * 100_000,
)


def report(text: str = "text", *, number: float = 1.5) -> dict[str, Any]:
    """A report of one worker with this text, and this number, wherever a worker or a profile decides."""
    return {
        "schema": 1,
        "cpulaunch": "1.0",
        "host": text,
        "exit_code": 0,
        "wall_seconds": number,
        "world_size": 1,
        "metrics": {text: {"sum": number, "values": [number, -number]}},
        "plan": _plan(text),
        "workers": [_worker(0, text, number), _worker(1, text, number)],
    }


def _plan(text: str) -> dict[str, Any]:
    workers = [
        {"index": index, "cpus": text, "threads": 1, "numa_nodes": text, "env": {text: text, "X": None}, "argv": [text]}
        for index in (0, 1)
    ]
    notes = [{"setting": "graph", "value": text, "origin": text, "reason": text}]
    return {"workers": workers, "notes": notes, "warnings": [text]}


def _worker(index: int, text: str, number: float) -> dict[str, Any]:
    return {
        "index": index,
        "rank": index,
        "pid": 1,
        "exit_code": 0,
        "signal": None,
        "wall_seconds": number,
        "peak_memory_bytes": 1 << 4000,
        "plugin": "loaded",
        "settings": {text: {"state": "degraded", "detail": text}},
        "graph": {
            "captured": [
                {"module": text, "signature": [text], "engine": {text: text}, "error": text, "speedup": number}
            ],
            "eager": [{"module": text, "reason": text}] * 3,
        },
        "chosen": [{"module": text, "signature": text, "mode": text, "speedup": number, "samples": {text: text}}],
        "weights": [
            {
                "module": text,
                "type": text,
                "kinds": {text: number},
                "bytes_before": -1,
                "bytes_after": True,
                "error_max": None,
                "reason": text,
            }
        ],
        "binding": {"as_planned": True, "openmp_runtime": text, "allocator": text},
        "metrics": {},
        "warnings": [text],
    }
