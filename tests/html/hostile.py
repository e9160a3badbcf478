"""Reports and comparisons whose every text was written by one who attacks their reader, and ordinary ones."""

from __future__ import annotations

from typing import Any

from cpulaunch.html.compare_page import compare_page
from cpulaunch.html.diagnose_page import diagnose_page
from cpulaunch.html.sides import PageMachine, PageSide
from cpulaunch.html.tune_page import tune_page
from cpulaunch.records.host import Calibration, CalibrationFigure

CALIBRATION = Calibration(
    date="2026-01-02",
    figures=(
        CalibrationFigure("products", "fp32", 200.0),
        CalibrationFigure("products", "bf16", 400.0),
        CalibrationFigure("read bandwidth", "all NUMA nodes", 20.0),
    ),
)
LABELS = {"data": "waiting for data", "products": "matrix products", "collective": "collectives", "tiny": "tiny ones"}
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
        "findings": [{"rule": text, "workers": [0, 1], "text": text, "fix": text}],
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


def comparison(text: str = "text", *, number: float = 1.5, sides: int = 3, rounds: int = 3) -> dict[str, Any]:
    """A comparison of these sides with this text wherever a program or its user decides, and this number."""
    sample = {"value": number, "seconds": number, "steal": 0.0, "other_cpus": 0.0, "throttled_seconds": 0.0}
    sample |= {"thermal_events": 0, "involuntary_switches": 0, "disturbed": [text]}
    side = {"label": text, "plain": False, "median": number, "spread": 0.1, "drift": 0.5, "metrics": {}}
    return {
        "schema": 1,
        "cpulaunch": "1.0",
        "host": text,
        "program": [text],
        "metric": {"name": text, "source": "program", "lower_is_better": True},
        "limits": {"until": 0.02, "rounds": 40, "budget_seconds": 60.0},
        "ended": "rounds",
        "seconds": number,
        "sides": [{**side, "plan": _plan(text), "workers": [_worker(0, text, number)]} for _ in range(sides)],
        "remarks": [text],
        "comparisons": [
            {
                "side": each,
                "to": 0,
                "ratio": number,
                "low": number,
                "high": number,
                "rounds": rounds,
                "verdict": "better",
                "text": text,
            }
            for each in range(1, sides)
        ],
        "rounds": [{"order": list(range(sides)), "samples": [sample] * sides} for _ in range(rounds)],
        "failures": [{"side": 0, "round": 1, "text": text, "exit_code": 1}],
    }


def search(text: str = "text", *, number: float = 1.5, trials: int = 6) -> dict[str, Any]:
    """A search for settings with this text wherever a program or its user decides, and this number."""
    states = ("measured", "cut short", "repeated", "failed")
    return {
        "schema": 1,
        "cpulaunch": "1.0",
        "host": text,
        "started": text,
        "seconds": 100.0,
        "ended": "finished",
        "program": [text],
        "options": [text],
        "machine": {text: text},
        "versions": {text: text},
        "metric": {"name": text, "source": "program", "lower_is_better": False},
        "throughput": False,
        "limits": {"trials": 40, "seconds": 60.0, "launch_seconds": None},
        "max_error": 0.01,
        "outputs": [text],
        "space": [{"setting": text, "values": [text]}],
        "reference": {"seconds": 1.0, "metrics": {text: number}},
        "baseline": [{"time": text, "value": number, "seconds": 1.0}] * 4,
        "trials": [_trial(each, states[each % 4], text, number) for each in range(trials)],
        "importance": {text: number, "other": 0.5},
        "final": {"default": [number, 1.5], "finalists": [_finalist(text, number), _finalist(text, 1.5)]},
        "winner": {
            "settings": {text: text},
            "options": [text],
            "confirmed": True,
            "ratio": number,
            "low": number,
            "high": number,
            "plan": _plan(text),
            "environment": [],
            "profile": text,
            "command": [text],
        },
        "default_plan": _plan(text),
        "verdict": text,
        "warnings": [text],
        "study": text,
    }


def _trial(number: int, state: str, text: str, ratio: float) -> dict[str, Any]:
    failed = state == "failed"
    return {
        "number": number,
        "started": text,
        "ended": text,
        "settings": {text: text},
        "options": [text],
        "state": state,
        "ratio": None if failed else ratio,
        "values": [] if failed else [ratio],
        "metrics": {text: ratio},
        "seconds": 1.0,
        "disturbed": [text],
        "failure": text if failed else None,
    }


def _finalist(text: str, ratio: float) -> dict[str, Any]:
    return {
        "settings": {text: text},
        "options": [text],
        "values": [ratio, 1.5],
        "ratio": ratio,
        "low": ratio,
        "high": ratio,
        "rounds": 2,
        "failure": None,
    }


def diagnosis(text: str = "text", *, number: float = 1.5, processes: int = 2) -> dict[str, Any]:
    """A diagnosis of these ranks with this text wherever a program or its user decides, and this number."""
    bottleneck = {"kind": "data-wait", "name": text, "share": 0.5, "speedup_at_most": number, "place": text}
    bottleneck |= {"process": 0, "option": text, "rule": text, "text": text}
    shares = {"data": 0.5, "products": 0.3, "collective": 0.1, "tiny": 0.1, "python": 0.0}
    return {
        "schema": 1,
        "cpulaunch": "1.0",
        "host": text,
        "program": [text],
        "verdict": text,
        "first": bottleneck,
        "second": bottleneck,
        "rates": {"products": number, "of_ceiling": 0.5, "bandwidth": number},
        "processes": [
            {
                "index": rank,
                "rank": rank,
                "pid": 1,
                "step": text,
                "steps": 20,
                "step_seconds": 0.1 * (rank + 1),
                "profiled_steps": 2,
                "examined_steps": 2.0,
                "examined_seconds": 0.2,
                "profiler_overhead": 0.01,
                "threads": 2,
                "shares": shares,
                "other_programs": 0.1,
                "loader_bytes": 1 << 20,
                "page_faults": number,
                "operations": [{"name": text, "count": 7, "seconds": number}] * 12,
            }
            for rank in range(processes)
        ],
        "remarks": [text],
    }


def diagnose_document(found: dict[str, Any]) -> str:
    """The page of a diagnosis."""
    return diagnose_page(found, machine="a machine", labels=LABELS)


def tune_document(search: dict[str, Any]) -> str:
    """The page of a search."""
    winner = search["winner"]
    sides = [PageSide(label="the default", plan=search["default_plan"])]
    sides += [PageSide(label="best", plan=winner["plan"], workers=[_worker(0, "text", 1.5)])] if winner else []
    return tune_page(search, machine=PageMachine(name="a machine", calibration=CALIBRATION), sides=sides)


def compare_document(comparison: dict[str, Any]) -> str:
    """The page of a comparison."""
    sides = [
        PageSide(label=each["label"], plan=None if each["plain"] else each["plan"], workers=each["workers"])
        for each in comparison["sides"]
    ]
    return compare_page(comparison, machine=PageMachine(name="a machine", calibration=CALIBRATION), sides=sides)
