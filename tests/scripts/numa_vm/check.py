"""Runs in the emulated machine: launches the worker with each requested set of options and prints the results as JSON.

Arguments: a JSON object {user: {name: [options…]}} and a command that runs last. One boot serves all of them, because a
boot takes the most time.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("touch.py")


def launch(user: str, options: list[str], path: str) -> dict[str, object]:
    """Exit code, standard error, duration and the reports of all workers of a user's launch, in worker order."""
    command = [sys.executable, "-m", "cpulaunch", *options, str(WORKER)]
    start = time.monotonic()
    environ, other = os.environ | {"PATH": path}, {}
    if user != "root":
        environ |= {"HOME": "/tmp", "USER": user, "LOGNAME": user}
        other = {"user": int(user), "group": int(user), "extra_groups": []}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, **other)
    lines = [line.rpartition("] ")[2] for line in sorted(result.stdout.splitlines())]
    return {
        "exit_code": result.returncode,
        "stderr": result.stderr,
        "workers": [json.loads(line) for line in lines],
        "seconds": round(time.monotonic() - start, 1),
    }


def let_all_users_search(*paths: str) -> None:
    """Effect: all users may search the folders of these paths, in the machine only."""
    for folder in {parent for path in paths for parent in Path(path).parents}:
        folder.chmod(folder.stat().st_mode | 0o111)


def main() -> None:
    """Effect: prints a JSON object with the result of each launch, by user, and of the command."""
    cases: dict[str, dict[str, list[str]]] = json.loads(sys.argv[1])
    results: dict[str, object] = {}
    for user, by_name in cases.items():
        if user != "root":
            let_all_users_search(sys.executable, os.path.realpath(sys.executable), os.path.abspath("x"), str(WORKER))
        paths = {name: os.environ["PATH"] if "numactl" in by_name[name] else "/nonexistent" for name in by_name}
        results[user] = {name: launch(user, options, paths[name]) for name, options in by_name.items()}
    ran = subprocess.run(sys.argv[2:], capture_output=True, text=True, check=False)
    print(json.dumps(results | {"command": {"exit_code": ran.returncode, "output": ran.stdout + ran.stderr}}))


if __name__ == "__main__":
    main()
