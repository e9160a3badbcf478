"""A program that measures parts of a calibration: `python -m cpulaunch.worker.calibration.main PARTS CPUS NODE BYTES`.

PARTS are names of parts with the subjects of their figures, "fp32=fp32,allocation=tcmalloc". CPUS: where its threads
run, "0-3", empty for all; NODE: the NUMA node of its memory, empty for any; BYTES: how much memory it reads. The last
line of stdout is the result: {"figures": [[part's kind, subject, value], …], "failures": ["why", …]}.
"""

from __future__ import annotations

import json
import os
import sys

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.system.mempolicy import MPOL_BIND, Policy, set_policy


def main(arguments: list[str]) -> int:
    """The exit code. Effect: binds this process, measures, and writes the result to stdout."""
    wanted, cpus, node, read_bytes = arguments
    failures = []
    if cpus:
        os.sched_setaffinity(0, parse_cpulist(cpus))
    if node:
        try:
            set_policy(Policy(mode=MPOL_BIND, numa_nodes=frozenset({int(node)})))
        except OSError as error:
            failures.append(f"memory is not bound to NUMA node {node}: {error.strerror}")
    from cpulaunch.worker.calibration.parts import parts

    known, figures = parts(read_bytes=int(read_bytes)), []
    for part in wanted.split(","):
        name, _, subject = part.partition("=")
        kind, measure = known[name]
        try:
            figures.append([kind, subject, measure()])
        except (RuntimeError, NotImplementedError, AttributeError, MemoryError) as error:
            failures.append(f"{kind}, {subject}: {' '.join(str(error).split())[:200]}")
    sys.stdout.write(json.dumps({"figures": figures, "failures": failures}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
