#!/usr/bin/env python3
"""Run one of several small PyTorch programs for a fixed time and print `NAME: 12.34 UNIT`.

Each is an ordinary program: random weights from a fixed seed, no downloads, and no settings of threads, allocator,
binding or compilation. It first prints the seconds from the start of the process to its first result.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from cases.program import Program
from cases.results import compared, results_of
from cases.text import TEXT
from cases.training import TRAINED
from cases.vision import VISION
from models import SEED
from pacing import count_steps
from torch import nn

PAIRED_WINDOW_SECONDS = 0.05
"""Short, so that a slow spell of the machine meets both windows of a pair; longer calls make longer windows."""

PROGRAMS = {**TEXT, **VISION, **TRAINED}


def seconds_since_start() -> float:
    """Seconds since this process started, including a launcher that became this program.

    Source: proc(5), /proc/PID/stat, field 22 (clock ticks from boot to the start of the process).
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def warm_up(program: Program, seconds: float) -> None:
    """Effect: runs whole cycles for at least `seconds`, and at least one."""
    count_steps(lambda: _run_cycle(program), seconds)


def _run_cycle(program: Program) -> None:
    for number in range(program.cycle):
        program.step(number)


def ratios_to_bypassed(program: Program, seconds: float) -> list[float]:
    """Rates divided by those of adjacent windows in which calls of modules bypass what has replaced nn.Module.__call__.

    Both are of this process, with the same memory and environment, and follow each other within a few calls: they
    show costs of one per cent where rates of two processes differ by ten. Takes twice `seconds`, and at least eight
    windows. The first half does not count: the plugin takes the bypassed windows for pauses of the program, and at
    first measures more calls after them.
    """
    in_force, bare = nn.Module.__call__, nn.Module._wrapped_call_impl
    durations: dict[bool, float] = {}
    ratios: list[float] = []

    def measure(is_bypassed: bool) -> None:
        nn.Module.__call__ = bare if is_bypassed else in_force  # type: ignore[method-assign]
        try:
            count, elapsed = count_steps(lambda: _run_cycle(program), PAIRED_WINDOW_SECONDS)
        finally:
            nn.Module.__call__ = in_force  # type: ignore[method-assign]
        durations[is_bypassed] = elapsed / count

    def measure_pairs() -> None:
        for first in (True, False):
            measure(first)
            measure(not first)
            ratios.append(durations[True] / durations[False])

    count_steps(measure_pairs, seconds)
    ratios.clear()
    count_steps(measure_pairs, seconds)
    return ratios


def run(name: str, program: Program, options: argparse.Namespace) -> None:
    """Effect: runs and measures the program, and prints what it measured."""
    early = results_of(program) if program.training and options.reference else None
    if early is None:
        program.step(0)
    print(f"first result: {seconds_since_start():.3f} s", flush=True)
    warm_up(program, options.warmup_seconds)
    if options.paired_seconds and not program.training:
        for ratio in ratios_to_bypassed(program, options.paired_seconds):
            print(f"{name}: {ratio:.4f} of bypassed", flush=True)
    if options.paced:
        print("ready", flush=True)
    for _ in sys.stdin if options.paced else range(1):
        _run_cycle(program)  # Other programs have used the caches since.
        cycles, seconds = count_steps(lambda: _run_cycle(program), options.seconds)
        print(f"{name}: {cycles * program.cycle * program.amount / seconds:.2f} {program.unit}", flush=True)
    if options.reference:
        error, agreement = compared(early or results_of(program), torch.load(options.reference))
        print(f"{name}: {error:.3e} largest error", flush=True)
        if not program.training:
            print(f"{name}: {agreement:.5f} agreement", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROGRAMS, metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    parser.add_argument("--warmup-seconds", type=float, default=10.0, help="shortest time before the measured window")
    parser.add_argument("--paired-seconds", type=float, default=0.0, help="also compare with bypassed calls")
    parser.add_argument("--paced", action="store_true", help="measure a window for each line of standard input")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="also compare the results with those in FILE")
    parser.add_argument("--write-reference", type=Path, metavar="FILE", help="only write the results to FILE")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    program = PROGRAMS[options.name]()
    with nullcontext() if program.training else torch.no_grad():
        if options.write_reference:
            torch.save(results_of(program), options.write_reference)
        else:
            run(options.name, program, options)


if __name__ == "__main__":
    main()
