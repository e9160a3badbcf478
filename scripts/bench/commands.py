"""Starts the commands under test together, waits for them and ends them."""

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
    """Command line of one process, and variables that are added to the inherited environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(f"{key}={value}" for key, value in self.env.items()), *self.argv])


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Commands that run at the same time and together start `copies` copies of a program."""

    commands: tuple[Command, ...]
    copies: int


def start(
    command: Command, *, output: IO[str] | int, errors: IO[str] | int, requests: int | None = None
) -> subprocess.Popen[str]:
    """The started process; `requests` is its standard input. Raises: BenchError if it cannot be started."""
    environment = {**os.environ, **command.env}
    try:
        return subprocess.Popen(
            command.argv, env=environment, stdin=requests, stdout=output, stderr=errors, text=True, bufsize=1
        )
    except OSError as error:
        raise BenchError(f"cannot start: {command}\n{error}") from error


def run_peer(peer: Peer, *, timeout_seconds: float | None = None) -> str:
    """Standard output of all commands of the peer together.

    Raises: BenchError if one cannot be started, ends with an error, or is still running after `timeout_seconds`.
    Effect: runs them at the same time; the first failure ends the others.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes: list[subprocess.Popen[str]] = []
        try:
            for command in peer.commands:
                processes.append(start(command, output=output, errors=errors))
            failure = _failure(processes, timeout_seconds)
        finally:
            for process in processes:
                end(process)
        output.seek(0)
        errors.seek(0)
        if failure:
            raise BenchError(f"{failure}: {peer.commands[0]}\n{_last_lines(errors.read() or output.read())}")
        return output.read()


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-8:])


def _failure(processes: Sequence[subprocess.Popen[str]], timeout_seconds: float | None) -> str | None:
    """The reason for which the run failed; None after all processes have succeeded."""
    if len(processes) == 1 and timeout_seconds is None:  # No polling: the caller may be timing this wait.
        return f"exit code {processes[0].returncode}" if processes[0].wait() else None
    deadline = time.monotonic() + (timeout_seconds or float("inf"))
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return f"exit code {failed}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return f"not finished after {timeout_seconds:g} s"
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    """Effect: ends the process with SIGTERM; kills it and its descendants if it ignores that, as run_cpu may do."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
