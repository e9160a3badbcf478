"""Ranks of a test: processes with the variables that torchrun would set."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import cache
from pathlib import Path

from cpulaunch.launch.ranks.port import PortReservation
from tests.forked import Forked
from tests.worker.applying import without_gloo

HERE = Path(__file__).parent
LIBRARY = next(iter(Path(sys.prefix).glob("lib/libccl.so.2")), None)
"""oneCCL, if it is installed."""
ROOT = HERE.parents[2]
SLOW_IMPORTS = ("torch.distributed", "torch._dynamo", "cpulaunch.ccl")
"""What takes each rank seconds to import."""


RESERVED = 8
_reserved: deque[PortReservation] = deque()
"""The most recent ports, reserved so that no other test takes them before the ranks use them."""


def free_port() -> int:
    if len(_reserved) == RESERVED:
        with _reserved.popleft():
            pass
    _reserved.append(PortReservation(None))
    return _reserved[-1].port


def environment(size: int, port: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CCL_", "FI_", "CPULAUNCH"))}
    added = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return inherited | added


@cache
def yielding() -> str | None:
    """The path of the library of yielding.c, for as long as this process runs; None without a C compiler.

    Effect: compiles it.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if LIBRARY is None or compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "yielding.so")
        command = [compiler, "-O2", "-shared", "-fPIC", str(HERE / "yielding.c"), "-o", str(built), "-ldl"]
        subprocess.run(command, check=True)
        memory = os.memfd_create("yielding")
        os.write(memory, built.read_bytes())
    return f"/proc/{os.getpid()}/fd/{memory}"


def start(size: int, arguments: list[str], **changes: str) -> list[Forked]:
    """One process for each rank; `changes` are environment variables for all of them."""
    common = environment(size, free_port()) | changes
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [Forked(arguments, common | each, modules=SLOW_IMPORTS, preload=yielding()) for each in own]


def finish(ranks: list[Forked] | list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str, str]]:
    """Each rank's exit code, stdout and stderr; kills ranks that still run after `seconds` (code -9)."""
    results = []
    deadline = time.monotonic() + seconds
    try:
        for rank in ranks:
            try:
                out, err = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                out, err = rank.communicate()
            results.append((rank.returncode, without_gloo(out), err))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    return results


def run_checks(module: str, size: int, path: str, *names: str, **changes: str) -> dict[str, str]:
    """Name of each check -> "ok" or its errors, in a program of `size` ranks whose groups use `path`.

    Without names, all checks of the module run. A program that does not end well adds "end" with its errors.
    """
    program = [str(HERE / "ccl_program.py"), module, *names]
    results = finish(start(size, program, CPULAUNCH_CCL_PATH=path, **changes), 240)
    lines = results[0][1].splitlines()
    found = dict(json.loads(line) for line in lines if line.startswith('["'))
    for line in lines:
        found |= json.loads(line) if line.startswith('{"library"') else {}
    ended = [f"rank {rank}: exit code {code}\n{err[-3000:]}" for rank, (code, _, err) in enumerate(results) if code]
    if ended:
        found["end"] = "\n".join(ended)
    return found
