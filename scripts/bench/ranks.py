"""Starts the ranks of a bench with the variables that torchrun sets, and returns the result of rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEADLINE_SECONDS = 1800


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(program: str, size: int, argument: object, variables: Mapping[str, str] | None = None) -> Any:
    """The JSON value in the last line of rank 0. All ranks get `argument`, as JSON, and `variables`.

    Raises: RuntimeError if a rank fails.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CCL_", "CPULAUNCH"))}
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / program), json.dumps(argument)]
    ranks = [_start(command, kept | common | {"RANK": str(rank)} | dict(variables or {})) for rank in range(size)]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{program}: ranks ended with {[rank.returncode for rank in ranks]}")
    return json.loads(last_line(outputs[0]))


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**environment, "LOCAL_RANK": environment["RANK"]},
        stdout=subprocess.PIPE,
        text=True,
    )


def last_line(output: str) -> str:
    """The last line of an output (torch and its backends may print lines before). Raises: RuntimeError if empty."""
    lines = output.strip().splitlines()
    if not lines:
        raise RuntimeError("rank 0 printed nothing")
    return lines[-1]
