"""A saved diagnosis, as `cpulaunch diagnose --json` wrote it, read with care."""

from __future__ import annotations

import json

from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

MAX_BYTES = 1 << 26
SCHEMA = 1
MAX_THREADS = 1 << 22
"""Hashes of larger numbers can be made to collide. Source: Linux, include/linux/threads.h, PID_MAX_LIMIT."""
LARGEST = 1e100
"""Of larger numbers, and of times below its inverse, neither sums nor ratios need be numbers that a float holds."""


@record
class Document:
    """A diagnosis. `parts`: seconds of a step by part, the mean of all processes. `first`: the bottleneck's name.

    `first_share`: of a step's time. `steps`: the fewest that were measured of a process. `others`: the largest share
    of the time that other programs took. `step`: what ends one; `threads`: of each process.
    """

    program: tuple[str, ...]
    host: str
    parts: Mapping[str, float]
    seconds: float
    first: str | None
    first_share: float
    processes: int
    steps: int
    others: float
    step: frozenset[str]
    threads: frozenset[int]

    def share(self, part: str) -> float:
        """The part's share of a step's time."""
        return self.parts.get(part, 0.0) / self.seconds


def read_document(path: str) -> Document:
    """The diagnosis in a file. Raises: CpulaunchError if it holds none."""
    try:
        with open(path, "rb") as file:  # The user names it: a link or a pipe will do.
            text = file.read(MAX_BYTES).decode()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "it is no text") from None
    try:
        return _from(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise _unreadable(path, "it is no object that diagnose --json wrote") from None


def _unreadable(path: str, reason: str) -> CpulaunchError:
    return CpulaunchError(
        "no diagnosis can be read", value=path, source=reason, hint="cpulaunch diagnose --json SCRIPT > FILE"
    )


def _from(data: Mapping[str, Any]) -> Document:
    """The document. Raises: ValueError, TypeError, KeyError, AttributeError if it is another one."""
    if data["schema"] != SCHEMA or not data["processes"]:
        raise ValueError("not a diagnosis of this format")
    processes: Sequence[Mapping[str, Any]] = data["processes"]
    first = data["first"]
    parts = _mean_parts(processes)
    return Document(
        program=tuple(map(str, data["program"])),
        host=str(data["host"]),
        parts=parts,
        seconds=_positive(sum(parts.values())),
        first=None if first is None else str(first["name"]),
        first_share=0.0 if first is None else _finite(first["share"]),
        processes=len(processes),
        steps=min(int(each["steps"]) for each in processes),
        others=max(_finite(each["other_programs"]) for each in processes),
        step=frozenset(str(each["step"]) for each in processes),
        threads=frozenset(_threads(each["threads"]) for each in processes),
    )


def _threads(value: object) -> int:
    found = int(_finite(value))
    if not 0 <= found <= MAX_THREADS:
        raise ValueError("not a number of threads")
    return found


def _mean_parts(processes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in processes:
        seconds = _positive(each["step_seconds"])
        for name, share in each["shares"].items():
            found[str(name)] = found.get(str(name), 0.0) + seconds * _finite(share) / len(processes)
    return found


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("not a number")
    return float(value)


def _positive(value: object) -> float:
    found = _finite(value)
    if found < 1 / LARGEST:
        raise ValueError("not a time")
    return found
