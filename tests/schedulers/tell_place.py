"""Prints one line of JSON: the job's variables and the CPUs of this process. Needs no torch."""

import json
import os
import sys

TOLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
)
answer = {name: os.environ.get(name) for name in TOLD} | {
    "cpus": sorted(os.sched_getaffinity(0)),
    "host": os.uname().nodename,
}
sys.stdout.write(json.dumps(answer) + "\n")
sys.exit(7 if os.environ.get("FAILING_RANK", "none") == os.environ.get("RANK") else 0)
