"""Python programs in processes that a server forks, which has imported what takes a program seconds."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("forks.py")
FOREIGN = ("CCL_", "FI_", "CPULAUNCH", "PYTHONPATH")
"""Beginnings of names of variables that the server does not inherit."""


@cache
def server(modules: tuple[str, ...], python_path: str | None, preload: str | None) -> socket.socket:
    """A connection to the server that has imported these modules, from packages in the folders `python_path`.

    OpenMP reads its number of threads there: it is one in all programs. `preload`: a library that all of them have.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    given = {"PYTHONPATH": python_path, "LD_PRELOAD": preload}
    own = {"OMP_NUM_THREADS": "1"} | {name: value for name, value in given.items() if value is not None}
    with theirs:
        subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno()), *modules],
            env=inherited | own,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours


class Forked:
    """A process of the server forks.py, with the methods of subprocess.Popen that tests use."""

    _number = struct.Struct("i")

    def __init__(
        self,
        arguments: list[str],
        environ: dict[str, str],
        *,
        modules: tuple[str, ...],
        folder: Path | None = None,
        preload: str | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._out, self._err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))  # noqa: SIM115 - closed by communicate
        self._answers, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([arguments, environ, str(folder or Path.cwd())]).encode()
            descriptors = [self._out.fileno(), self._err.fileno(), theirs.fileno()]
            socket.send_fds(server(modules, environ.get("PYTHONPATH"), preload), [request], descriptors)
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
                raise subprocess.TimeoutExpired("program", timeout or 0) from None
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


def run_forked(
    arguments: list[str], environ: dict[str, str], *, modules: tuple[str, ...], folder: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    """What became of a process of the server; it is killed after `seconds`. Raises: TimeoutExpired."""
    program = Forked(arguments, environ, modules=modules, folder=folder)
    try:
        out, err = program.communicate(timeout=seconds)
    finally:
        program.kill()
    return subprocess.CompletedProcess(arguments, program.returncode, out, err)
