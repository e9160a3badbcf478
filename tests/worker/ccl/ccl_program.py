"""A rank of the tests: runs the named checks of a module in turn, without names all of them.

Rank 0 prints whether the compiled library is in use, as a JSON object, and the result of each check, as a line of JSON.
"""

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

import cpulaunch.ccl  # noqa: F401 - registers the backend


def main(module: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("ccl")
    gloo = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            print(json.dumps({"library": "used" if "libcpulaunch_ccl" in maps.read() else "none"}), flush=True)
    checks = importlib.import_module(module).CHECKS
    for name in names or checks:
        try:
            checks[name](gloo)
            result = "ok"
        except Exception:  # noqa: BLE001 - any error is the result of the check
            result = traceback.format_exc()
        # Also keeps a rank whose check failed early from running ahead.
        results = [""] * dist.get_world_size()
        dist.all_gather_object(results, result, group=gloo)
        if dist.get_rank() == 0:
            bad = [f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "ok"]
            print(json.dumps([name, "\n".join(bad) or "ok"]), flush=True)
    dist.destroy_process_group()


faulthandler.dump_traceback_later(420)  # Shows where a rank hangs.
main(*sys.argv[1:])
