"""Cost of a launcher while its workers run: peak memory and CPU time of its own processes.

Processes with children belong to the launcher; the leaves of the process tree are the workers.
Source: /proc/PID/status (VmHWM), /proc/PID/task/TID/schedstat (nanoseconds on a CPU), /proc/PID/task/TID/children.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from commands import BenchError, Command, end, start
from process_tree import split_tree

SETTLE_SECONDS = 2.0
START_SECONDS = 60.0
"""Limit for the launcher to start its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCost:
    """Peak resident memory of each process of a launcher, and their CPU time while the workers slept."""

    peak_bytes: tuple[int, ...]
    cpu_ms: float


def measure_launcher_cost(command: Command, *, workers: int, seconds: float) -> LauncherCost:
    """Cost of the launcher over `seconds` with `workers` idle workers.

    Raises: BenchError if the workers do not start or end early.
    Effect: starts the command and ends it.
    """
    process = start(command, output=subprocess.DEVNULL, errors=subprocess.DEVNULL)
    try:
        _wait_for_workers(process, workers)
        time.sleep(SETTLE_SECONDS)
        launcher, _ = split_tree(process.pid)
        before = sum(map(_cpu_nanoseconds, launcher))
        time.sleep(seconds)
        used = sum(map(_cpu_nanoseconds, launcher)) - before
        peaks = tuple(parse_peak_bytes(Path(f"/proc/{pid}/status").read_text()) for pid in launcher)
        return LauncherCost(peak_bytes=peaks, cpu_ms=used / 1e6)
    except FileNotFoundError as error:
        raise BenchError(f"ended too early: {command}") from error
    finally:
        end(process)


def parse_peak_bytes(status: str) -> int:
    """VmHWM in the text of /proc/PID/status, in bytes. Raises: BenchError without that line."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, flags=re.MULTILINE)
    if not found:
        raise BenchError("/proc/PID/status has no VmHWM")
    return int(found[1]) * 1024


def _wait_for_workers(process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while len(split_tree(process.pid)[1]) < count:
        if time.monotonic() > deadline or process.poll() is not None:
            raise BenchError(f"fewer than {count} workers after {START_SECONDS:g} s: {process.args!r}")
        time.sleep(0.05)


def _cpu_nanoseconds(pid: int) -> int:
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
