"""Time until a job of two ranks prints its first line: a program that only prints, and one with an all-reduce first."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from commands import BenchError, Command, end, start
from interleave import Spread, measure_rounds, paired_ratios, spread
from peers import tool

HERE = Path(__file__).parent
LAUNCHERS = ("torchrun", "cpulaunch")
PROGRAMS = {"first line": "noop.py", "first all-reduce": "all_reduce.py"}
VARIANTS = tuple(f"{launcher}, {program}" for program in PROGRAMS for launcher in LAUNCHERS)


def job_command(variant: str) -> Command:
    """The command line of a variant: both launchers get the same arguments."""
    launcher, program = variant.split(", ")
    return Command(argv=(tool(launcher), "--nproc-per-node", "2", str(HERE / PROGRAMS[program])))


def first_line_milliseconds(command: Command) -> float:
    """Milliseconds from the start of the command to its first line on standard output.

    Raises: BenchError if the command failed or printed nothing.
    """
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = start(command, output=subprocess.PIPE, errors=errors)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            elapsed = time.perf_counter() - begin
            process.stdout.read()
            code = process.wait()
        finally:
            end(process)
        if code or not line:
            errors.seek(0)
            raise BenchError(f"exit code {code}, first line {line!r}: {command}\n{errors.read()[-1000:]}")
    return elapsed * 1e3


def measure_first_lines(rounds: int) -> dict[str, list[float]]:
    """Variant -> milliseconds of each round, after one unmeasured start of each. Raises: BenchError."""

    def measure(variant: str) -> float:
        return first_line_milliseconds(job_command(variant))

    for variant in VARIANTS:
        measure(variant)
    return measure_rounds(VARIANTS, measure, rounds=rounds)


def compare_first_lines(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Spread]]:
    """Variant -> its milliseconds, and its speed-up over torchrun with the same program."""
    return {
        variant: {
            "first_line_ms": spread(values),
            "times_sooner_than_torchrun": spread(paired_ratios(samples[_reference(variant)], values)),
        }
        for variant, values in samples.items()
    }


def _reference(variant: str) -> str:
    return f"torchrun, {variant.split(', ')[1]}"
