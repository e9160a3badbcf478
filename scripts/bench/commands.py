"""Commands under test: started together, waited for, ended."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from process_tree import kill_tree

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


def start(command: Command, *, output: IO[str] | int, errors: IO[str] | int) -> subprocess.Popen[str]:
    """The started process. Raises: BenchError if it cannot be started."""
    try:
        return subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdout=output, stderr=errors, text=True
        )
    except OSError as error:
        raise BenchError(f"cannot start: {command}\n{error}") from error


def run_peer(peer: Peer, *, patience_seconds: float | None = None) -> str:
    """Standard output of all its commands together.

    Raises: BenchError if one cannot be started, ends with an error, or is still running after `patience_seconds`.
    Effect: runs them at the same time; the first failure ends the others.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes: list[subprocess.Popen[str]] = []
        try:
            for command in peer.commands:
                processes.append(start(command, output=output, errors=errors))
            complaint = _complaint(processes, patience_seconds)
        finally:
            for process in processes:
                end(process)
        output.seek(0)
        errors.seek(0)
        if complaint:
            raise BenchError(f"{complaint}: {peer.commands[0]}\n{_last_lines(errors.read() or output.read())}")
        return output.read()


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-8:])


def _complaint(processes: Sequence[subprocess.Popen[str]], patience_seconds: float | None) -> str | None:
    """Why the run is no result, or None once all processes have succeeded."""
    if len(processes) == 1 and patience_seconds is None:  # no polling: this wait may be what is timed
        return f"exit code {processes[0].returncode}" if processes[0].wait() else None
    deadline = time.monotonic() + (patience_seconds or float("inf"))
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return f"exit code {failed}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return f"not done after {patience_seconds:g} s"
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
