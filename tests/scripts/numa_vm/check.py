"""Runs in the emulated machine: launches the worker with each requested set of options and prints the results as JSON.

Arguments: a JSON object {name: [options…]}. One boot serves many launches, because a boot takes the most time.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("touch.py")


def launch(options: list[str], path: str) -> dict[str, object]:
    """Exit code, standard error, duration and the reports of all workers of one launch, in worker order."""
    command = [sys.executable, "-m", "cpulaunch", *options, str(WORKER)]
    start = time.monotonic()
    result = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    lines = [line.rpartition("] ")[2] for line in sorted(result.stdout.splitlines())]
    return {
        "exit_code": result.returncode,
        "stderr": result.stderr,
        "workers": [json.loads(line) for line in lines],
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Effect: prints a JSON object with the result of each launch."""
    cases: dict[str, list[str]] = json.loads(sys.argv[1])
    results = {}
    for name, options in cases.items():
        path = os.environ["PATH"] if "numactl" in options else "/nonexistent"
        results[name] = launch(options, path)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
