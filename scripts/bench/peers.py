"""The ways to start a program that the benches compare: each is data, one or more commands with their environment."""

from __future__ import annotations

import ctypes.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from machine import free_cores
from process_tree import kill_tree

BIN = Path(sys.executable).parent
"""The environment under test: programs are taken from where this interpreter lives."""


GRACE_SECONDS = 5.0


class BenchError(Exception):
    """A command under test failed; the message names it and quotes its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What one process is started with; `env` is laid over the inherited environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(f"{key}={value}" for key, value in self.env.items()), *self.argv])


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way to start `copies` copies of a program: all `commands` run at the same time."""

    commands: tuple[Command, ...]
    copies: int


def _python(program: Sequence[str], instances: int) -> Peer:
    return Peer(commands=(Command(argv=(sys.executable, *program)),), copies=1)


def _run_cpu(program: Sequence[str], instances: int) -> Peer:
    argv = (sys.executable, "-m", "torch.backends.xeon.run_cpu", "--ninstances", str(instances), *program)
    return Peer(commands=(Command(argv=argv),), copies=instances)


def _cpulaunch(program: Sequence[str], instances: int) -> Peer:
    return Peer(
        commands=(Command(argv=(_tool("cpulaunch"), "--instances", str(instances), *program)),), copies=instances
    )


def _cpulaunch_one(program: Sequence[str], instances: int) -> Peer:
    return Peer(commands=(Command(argv=(_tool("cpulaunch"), *program)),), copies=1)


def _torchrun(program: Sequence[str], instances: int) -> Peer:
    argv = (_tool("torchrun"), "--standalone", "--nproc-per-node", str(instances), *program)
    return Peer(commands=(Command(argv=argv),), copies=instances)


def _numactl(program: Sequence[str], instances: int) -> Peer:
    """The recipe of tuning guides: equal shares of the cores, local memory, bound threads, tcmalloc, Intel OpenMP."""
    cores = free_cores()
    share = len(cores) // instances
    if share == 0:
        raise BenchError(f"{instances} instances need as many cores; usable here: {len(cores)}")
    commands = []
    for first in range(0, share * instances, share):
        cpus = ",".join(map(str, cores[first : first + share]))
        argv = ("numactl", f"--physcpubind={cpus}", "--localalloc", sys.executable, *program)
        commands.append(Command(argv=argv, env=_hand_written_environment(share)))
    return Peer(commands=tuple(commands), copies=instances)


def _hand_written_environment(threads: int) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "KMP_BLOCKTIME": "1",
    }
    libraries = [ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")]
    intel_openmp = BIN.parent / "lib" / "libiomp5.so"
    libraries.append(str(intel_openmp) if intel_openmp.exists() else None)
    found = [library for library in libraries if library]
    return environment | ({"LD_PRELOAD": ":".join(found)} if found else {})


def _tool(name: str) -> str:
    return str(BIN / name)


PEERS: dict[str, Callable[[Sequence[str], int], Peer]] = {
    "python": _python,
    "run_cpu": _run_cpu,
    "torchrun": _torchrun,
    "numactl": _numactl,
    "cpulaunch": _cpulaunch,
    "cpulaunch-1": _cpulaunch_one,
}
"""Name -> (program and its arguments, instances) -> Peer. `cpulaunch-1` is cpulaunch with one instance."""


def start(command: Command, *, output: IO[str] | int, errors: IO[str] | int) -> subprocess.Popen[str]:
    """The started process. Raises: BenchError if it cannot be started."""
    try:
        return subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdout=output, stderr=errors, text=True
        )
    except OSError as error:
        raise BenchError(f"cannot start: {command}\n{error}") from error


def run_peer(peer: Peer) -> str:
    """Standard output of all its commands together.

    Raises: BenchError if one cannot be started or ends with an error.
    Effect: runs them at the same time; the first failure ends the others.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes: list[subprocess.Popen[str]] = []
        try:
            for command in peer.commands:
                processes.append(start(command, output=output, errors=errors))
            failed = _wait_for_all(processes)
        finally:
            for process in processes:
                end(process)
        output.seek(0)
        errors.seek(0)
        if failed is not None:
            last_lines = "\n".join(errors.read().splitlines()[-8:])
            raise BenchError(f"exit code {processes[failed].returncode}: {peer.commands[failed]}\n{last_lines}")
        return output.read()


def _wait_for_all(processes: Sequence[subprocess.Popen[str]]) -> int | None:
    """The index of the first process to fail, or None once all have succeeded."""
    if len(processes) == 1:  # no polling: this wait may be what is timed
        return 0 if processes[0].wait() else None
    while True:
        codes = [process.poll() for process in processes]
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    """Effect: ends the process and all below it; politely first, but run_cpu has been seen to hang on SIGTERM."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
