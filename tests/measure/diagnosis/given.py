"""Figures as a process would write them, for the analysis."""

import json
from typing import Any

from cpulaunch.measure.diagnosis.figures import ProcessFigures, read_figures

NO_SUMS = {
    **dict.fromkeys(("thread_delay", "thread_stime", "thread_minflt", "process_minflt", "rss"), 0.0),
    **dict.fromkeys(("data_seconds", "data_cpu", "collective_seconds", "collective_cpu", "backward_seconds"), 0.0),
    **dict.fromkeys(("backward_cpu", "backward_collective_seconds"), 0.0),
}
CALLS = {"all": 10, "forward": 10, "outside": 0, "accesses": 0, "tiny": 0, "synchronization": 0, "backward": 0}


def window(seconds: float, *, kinds: Any = None, tiny: Any = None, calls: Any = None, **other: Any) -> dict[str, Any]:
    """What the profiler saw of one step."""
    return {
        "seconds": seconds,
        "events": 100,
        "kinds": kinds or {},
        "tiny": {"seconds": 0.0, "synchronization": 0.0, "outside": 0.0, **(tiny or {})},
        "pauses": 0.0,
        "overhead": 0.0,
        "absorbed": 0.0,
        "delay": 0.0,
        "calls": CALLS | (calls or {}),
        "flops": {},
        "timed": {},
        "operations": [["aten::mm", 4, seconds]],
        **other,
    }


def data(*, step: float = 0.1, cpus: str = "0-1", sums: Any = None, **changes: Any) -> dict[str, Any]:
    """Ten steps of a process that multiplies matrices all the time, but for the changes."""
    return {
        "schema": 1,
        "pid": 7,
        "index": 0,
        "rank": None,
        "world_size": 1,
        "step": "module",
        "steps": 10,
        "seen_steps": 20,
        "started": 100.0,
        "ended": 110.0,
        "participants": 1,
        "seconds": 10 * step,
        "median_seconds": step,
        "profiled_steps": 1,
        "profiled_seconds": step,
        "sums": NO_SUMS | {"thread_cpu": 10 * step} | (sums or {}),
        "window": window(step, kinds={"products": step}),
        "window_failure": "",
        "slowdowns": {},
        "threads": 2,
        "cpus": [0, 1],
        "busy_threads": [{"seconds": 5.0, "cpus": cpus}, {"seconds": 5.0, "cpus": cpus}],
        "loader_workers": None,
        "prefetched": 0,
        "batch_bytes": 0,
        "fetches": {},
        "where": {"samples": 10, "doing": {"": 10}, "places": [["", "train.py:3", 10]]},
        "snapshot": {"pages": {"0": 1 << 30}},
        **changes,
    }


def figures(**changes: Any) -> ProcessFigures:
    """The figures that `data` makes, as they are read."""
    found = read_figures(json.dumps(data(**changes)))
    assert found is not None
    return found
