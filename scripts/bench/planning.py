"""Time to probe this machine and a synthetic one with 1,024 logical CPUs, and to plan 256 workers on the latter."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interleave import Spread, measure_rounds, paired_differences, spread

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

WORKERS = 256


def measure_planning(rounds: int) -> dict[str, Spread]:
    """Milliseconds to probe each machine for a launch, their difference, and milliseconds to plan."""
    from roots import RootSpec, write_root

    from cpulaunch.cli.arguments import parse_command_line
    from cpulaunch.cli.run import request_for
    from cpulaunch.plan.planner import make_plan
    from cpulaunch.probe import Root, probe_host

    line = parse_command_line(["--instances", str(WORKERS), "noop.py"], interpreter=sys.executable)
    environ = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        root = write_root(Path(folder), RootSpec(sockets=4, numa_per_socket=4, l3_per_numa=4, cores_per_l3=8, smt=2))

        def probe(path: str) -> object:
            return probe_host(Root(path), interpreter=sys.executable, environ=environ, detail="launch")

        host = probe_host(Root(str(root)), environ=environ, detail="launch")
        request = request_for(line, host, environ)
        steps: dict[str, Callable[[], object]] = {
            "probe this machine": lambda: probe("/"),
            "probe 1,024 CPUs": lambda: probe(str(root)),
            f"plan {WORKERS} workers": lambda: make_plan(host, request),
        }
        samples = measure_rounds(list(steps), lambda name: _milliseconds(steps[name]), rounds=rounds)
    added = paired_differences(samples["probe 1,024 CPUs"], samples["probe this machine"])
    samples["probe 1,024 CPUs, added"] = added
    return {name: spread(values) for name, values in samples.items()}


def _milliseconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3
