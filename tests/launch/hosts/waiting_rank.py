"""A rank for tests that says it is there, counts SIGUSR1, and waits to be ended."""

import json
import os
import signal
import sys

signal.signal(signal.SIGUSR1, lambda *_: print(json.dumps({"signal": os.environ["LOCAL_RANK"]}), flush=True))
print(
    json.dumps(
        {
            "pid": os.getpid(),
            "argv": sys.argv[1:],
            "cpus": sorted(os.sched_getaffinity(0)),
            "shared_store": os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
            "local_rank": os.environ["LOCAL_RANK"],
            "main": __name__,
        }
    ),
    flush=True,
)
while len(sys.argv) < 2:
    signal.pause()
