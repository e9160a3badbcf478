"""A worker: says on one line of JSON which CPUs it may use and what its environment says about threads."""

import json
import os
import sys

report = {"cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS"), "args": sys.argv[1:]}
os.write(1, (json.dumps(report) + "\n").encode())
