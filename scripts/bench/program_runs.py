"""Runs of program.py that wait between their measured windows, so that several take turns on one machine."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from contextlib import suppress
from types import TracebackType

from commands import BenchError, Command, end, start
from rates import parse_figures

PROGRAMS = (
    *("encoder", "t5", "llama", "whisper", "gpt2", "lstm", "resnet", "depthwise", "vit", "swin", "convnext", "clip"),
    *("unet", "dlrm", "mlp", "mlp_training", "bert_training"),
)
UNITS = ("samples/s", "tokens/s")
CHUNK_BYTES = 1 << 16


class PacedRun:
    """A running program that has warmed up, measures one window after another on request, and then compares results.

    `first_seconds`: seconds from the start of the process to its first result. `bypassed_ratios`: rates divided by
    those of adjacent windows of the same process in which calls bypass the plugin, if the command asks for them.
    """

    def __init__(self, command: Command, *, timeout_seconds: float) -> None:
        """Raises: BenchError if it cannot be started, ends early, or prints nothing for `timeout_seconds`."""
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._unread = b""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = start(command, output=subprocess.PIPE, errors=self._errors, requests=subprocess.PIPE)
        try:
            self.first_seconds = self._figure("s")
            self.bypassed_ratios: list[float] = []
            while "ready" not in (line := self._line_with("")):
                self.bypassed_ratios += [ratio for _, ratio in parse_figures(line, "of bypassed")]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PacedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(self) -> tuple[float, str]:
        """The rate in one window, and its unit. Raises: BenchError."""
        assert self._process.stdin
        try:
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it ended") from None
        line = self._line_with("/s")
        for unit in UNITS:
            for _, rate in parse_figures(line, unit):
                return rate, unit
        raise self._failure(f"it printed no rate: {line}")

    def compare(self) -> tuple[float | None, float | None]:
        """The largest error of its results and the share of equal choices; None where it has not compared them.

        Effect: waits for the end of the program. Raises: BenchError if it fails.
        """
        assert self._process.stdin
        self._process.stdin.close()
        output = ""
        while line := self._line():
            output += line
        if self._process.wait():
            raise self._failure(f"exit code {self._process.returncode}")
        errors, agreements = (parse_figures(output, unit) for unit in ("largest error", "agreement"))
        return errors[0][1] if errors else None, agreements[0][1] if agreements else None

    def close(self) -> None:
        """Effect: ends the program if it still runs."""
        end(self._process)
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file and not file.closed:
                with suppress(BrokenPipeError):  # A request that the program has not lived to read.
                    file.close()

    def _figure(self, unit: str) -> float:
        line = self._line_with(f" {unit}")
        figures = parse_figures(line, unit)
        if not figures:
            raise self._failure(f"it printed no figure: {line}")
        return figures[0][1]

    def _line_with(self, text: str) -> str:
        """The next line of its output with this text. Raises: BenchError."""
        while line := self._line():
            if text in line:
                return line
        raise self._failure(f"exit code {self._process.wait()}")

    def _line(self) -> str:
        """The next line of its output; empty at the end. Raises: BenchError."""
        assert self._process.stdout
        output = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([output], [], [], self._timeout_seconds)[0]:
                raise self._failure(f"silent for {self._timeout_seconds:g} s")
            chunk = os.read(output, CHUNK_BYTES)
            if not chunk:
                break
            self._unread += chunk
        line, newline, self._unread = self._unread.partition(b"\n")
        return (line + newline).decode(errors="replace")

    def _failure(self, reason: str) -> BenchError:
        self._errors.seek(0)
        last_lines = "\n".join(self._errors.read().splitlines()[-8:])
        return BenchError(f"{reason}: {self._command}\n{last_lines}")
