"""A rank of the tests: runs the checks of a module in turn; rank 0 prints the result of each as a line of JSON.

Before that rank 0 prints, as a JSON object, whether the compiled library is in use.
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


def main(module: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("ccl")
    gloo = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            print(json.dumps({"library": "used" if "libcpulaunch_ccl" in maps.read() else "none"}), flush=True)
    for name, check in importlib.import_module(module).CHECKS.items():
        try:
            check(gloo)
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
main(sys.argv[1])
