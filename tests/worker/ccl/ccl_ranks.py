"""Ranks of a test: processes with the variables that torchrun would set."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path

from cpulaunch.launch.ranks.port import PortReservation
from tests.worker.applying import without_gloo

HERE = Path(__file__).parent
LIBRARY = next(iter(Path(sys.prefix).glob("lib/libccl.so.2")), None)
"""oneCCL, if it is installed."""
ROOT = HERE.parents[2]


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
def server(python_path: str) -> socket.socket:
    """A connection to the server that forks ranks, for packages in the folder `python_path`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, str(HERE / "ccl_forks.py"), str(theirs.fileno())],
            env=environment(1, 0) | {"PYTHONPATH": python_path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours


class Rank:
    """A process of the server ccl_forks.py, with the methods of subprocess.Popen that tests use."""

    _number = struct.Struct("i")

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._out, self._err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))  # noqa: SIM115 - closed by communicate
        self._answers, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([arguments, environ, os.getcwd()]).encode()
            descriptors = [self._out.fileno(), self._err.fileno(), theirs.fileno()]
            socket.send_fds(server(environ["PYTHONPATH"]), [request], descriptors)
        (self.pid,) = self._number.unpack(self._answers.recv(self._number.size))

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises: TimeoutExpired."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                (self.returncode,) = self._number.unpack(self._answers.recv(self._number.size))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("rank", timeout or 0) from None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the process has written to stdout and stderr, after it has exited. Raises: TimeoutExpired."""
        self.wait(timeout)
        with self._answers, self._out, self._err:
            for file in (self._out, self._err):
                file.seek(0)
            return self._out.read(), self._err.read()

    def kill(self) -> None:
        """Effect: kills the process if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # It has just exited.
                os.kill(self.pid, signal.SIGKILL)


def start(size: int, arguments: list[str], **changes: str) -> list[Rank]:
    """One process for each rank; `changes` are environment variables for all of them."""
    common = environment(size, free_port()) | changes
    return [Rank(arguments, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def finish(ranks: list[Rank] | list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str, str]]:
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
