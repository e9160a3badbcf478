"""Runs in the emulated machine: launches the worker in every way the test asks for and prints what came of it as JSON.

Arguments: a JSON object {name: [options…]}. One boot serves many launches, since a boot costs most.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("touch.py")


def launch(options: list[str], path: str) -> dict[str, object]:
    """Exit code, standard error and every worker's report of one launch, in order of the workers."""
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
    """Print one JSON object: what became of each launch."""
    cases: dict[str, list[str]] = json.loads(sys.argv[1])
    results = {}
    for name, options in cases.items():
        path = os.environ["PATH"] if "numactl" in options else "/nonexistent"
        results[name] = launch(options, path)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
