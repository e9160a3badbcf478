"""The figures that processes wrote about their steps, read with care: any process may write anything there."""

from __future__ import annotations

import json
from math import isfinite
from operator import itemgetter

from cpulaunch.records.cpulist import mask_of, parse_cpulist
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

BUSY_THREAD = 0.05
"""Of the time, in which a thread runs or is ready to run: from this on it keeps busy."""
LEAST_PART, MOST_THREADS = 0.02, 256
"""Of what all threads ran, at most a quarter of what the busiest did: others are not busy. Of these as many
count as a process writes.
"""
MOST = 1 << 63
"""Counts and measured values from here on are malformed."""
DECIMALS = 12
"""Of seconds: a picosecond is less than anything takes."""


@record
class Places:
    """Where the program's own code was: (what it did, "file:line", samples), most first. `samples`: all of them."""

    samples: int = 0
    doing: Mapping[str, int] = field(default_factory=dict)
    places: tuple[tuple[str, str, int], ...] = ()

    def first(self, *doing: str) -> str | None:
        """The place seen most while the program did one of these."""
        return next((place for what, place, _ in self.places if what in doing), None)

    def share(self, *doing: str) -> float:
        """The share of the samples in which the program did one of these."""
        return sum(self.doing.get(each, 0) for each in doing) / self.samples if self.samples else 0.0


@record
class ProcessFigures:
    """What one process wrote. `sums`: counters over `seconds` of `steps` without the profiler. `window`: with it.

    `seen_steps`: all that it made until then. `started`, `ended`: when it was measured, in seconds of the clock.
    `participants`: how many processes of its job are on this host. `threads_beside`: Python threads of the program
    that make no steps and keep busy, `cpus_beside`: how many of these and idle ones ran or were ready to run.
    `cpus`, `busy_cpus`: the bits of their numbers are set.
    """

    pid: int
    index: int
    rank: int | None
    world_size: int
    step: str
    steps: int
    seen_steps: int
    started: float
    ended: float
    participants: int
    seconds: float
    median_seconds: float
    profiled_steps: int
    profiled_seconds: float
    sums: Mapping[str, float]
    window: Mapping[str, Any] | None
    window_failure: str
    slowdowns: Mapping[str, float]
    threads: int
    cpus: int
    busy_cpus: int
    threads_beside: int
    cpus_beside: float
    loader_workers: int | None
    prefetched: int
    batch_bytes: int
    fetches: Mapping[str, float]
    where: Places
    pages: Mapping[int, int]

    @property
    def reachable_cpus(self) -> int:
        """The CPUs that its busy threads may use, as bits; those of its main thread if none is known."""
        return self.busy_cpus or self.cpus

    @property
    def loader_bytes(self) -> int:
        """Memory that the batches of its DataLoader take which have been loaded ahead, when all are ready."""
        return (self.loader_workers or 0) * self.prefetched * self.batch_bytes

    @property
    def loader_cpus(self) -> float:
        """CPUs that the workers of its DataLoader keep busy."""
        return self.fetches.get("busy", 0.0) if self.loader_workers else 0.0

    @property
    def wanted_cpus(self) -> float:
        """How many of the process's threads ran or were ready to run at a time, on average; 0 if it is not known."""
        wanted, wall = self.sum("process_cpu") + self.sum("process_delay"), self.sum("wall") or self.seconds
        found = wanted / wall if wall > 0 else 0.0
        return found if found < MOST else 0.0

    @property
    def examined_steps(self) -> float:
        """How many steps the sums of the window are of: fewer than the profiled ones if it was cut."""
        part = 1.0 if self.window is None else float(self.window.get("part", 1.0))
        return self.profiled_steps * part

    def sum(self, name: str) -> float:
        """A counter's growth; 0 if it is not known."""
        return max(0.0, self.sums.get(name, 0.0))


def read_figures(text: str) -> ProcessFigures | None:
    """The figures in a file; None if it holds something else."""
    try:
        return _from(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _checked_window(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sums of a window. Raises: ValueError, TypeError, KeyError, AttributeError if they are of another form."""
    tiny = found["tiny"]
    return {
        **{name: _growth(found[name]) for name in ("seconds", "pauses", "overhead", "absorbed")},
        **{name: _growth(found.get(name, 0.0)) for name in ("delay", "backward_waits", "chained")},
        "part": min(1.0, _amount(found.get("part", 1.0))),
        "tiny": {name: _growth(tiny[name]) for name in ("seconds", "synchronization", "outside")},
        "calls": {str(name): _count(value) for name, value in found["calls"].items()},
        **{name: growths(found[name]) for name in ("kinds", "flops", "timed")},
        **{name: growths(found.get(name, {})) for name in ("low", "communication")},
        "bytes": {_bits(bits): (_amount(moved), _growth(spent)) for bits, (moved, spent) in found["bytes"].items()}
        if "bytes" in found
        else None,
        "operations": [(str(name), _count(count), _growth(spent)) for name, count, spent in found["operations"]],
    }


def growths(found: Mapping[str, Any]) -> dict[str, float]:
    """Amounts by which counters grew, by name.

    Raises: ValueError, TypeError, OverflowError, AttributeError if they are something else.
    """
    return {str(name): _growth(value) for name, value in found.items()}


def _finite(value: Any) -> float:
    """A number. Raises: ValueError, TypeError, OverflowError if it is none."""
    found = float(value)
    if not isfinite(found):
        raise ValueError("not a number")
    return found


def _amount(value: Any) -> float:
    """A number from 0 to MOST, without what is smaller than any that is measured: no quotient of two is infinite.

    Raises: as _finite.
    """
    found = _finite(value)
    if not 0 <= found < MOST:
        raise ValueError("not an amount")
    return round(found, DECIMALS)


def _growth(value: Any) -> float:
    """An amount by which a counter grew; 0 if it fell, as a difference of what was rounded may. Raises: as _finite."""
    return _amount(max(0.0, _finite(value)))


def _count(value: Any) -> int:
    """A whole number that is not negative, nor larger than anything that is counted. Raises: as _finite."""
    found = int(value)
    if not 0 <= found < MOST:
        raise ValueError("not a count")
    return found


def _bits(value: Any) -> int:
    """How many bits a count has. Raises: as _finite."""
    found = _count(value)
    if found > MOST.bit_length():
        raise ValueError("not the bits of a count")
    return found


def _busy_cpus(threads: Iterable[Mapping[str, Any]]) -> int:
    """The CPUs that busy threads may use, as bits. Raises: as _finite, or KeyError.

    Lists of CPUs are read one by one, as each may name thousands.
    """
    seconds = sorted(((_growth(each["seconds"]), each["cpus"]) for each in threads), reverse=True, key=itemgetter(0))
    least = min(LEAST_PART * sum(spent for spent, _ in seconds), seconds[0][0] / 4) if seconds else 0.0
    found: set[int] = set()
    for cpus in {cpus for spent, cpus in seconds[:MOST_THREADS] if spent > least}:
        found |= parse_cpulist(cpus)
    return mask_of(found)


def _from(data: Mapping[str, Any]) -> ProcessFigures:
    where = data["where"]
    elapsed = max(1e-3, _amount(data["ended"]) - _amount(data["started"]))
    beside = [
        (_growth(each["seconds"]) + _growth(each.get("delay", 0.0))) / elapsed
        for each in data["busy_threads"]
        if each.get("is_beside", False) and _growth(each["seconds"]) > 0
    ]
    return ProcessFigures(
        pid=_count(data["pid"]),
        index=_count(data["index"]),
        rank=None if data["rank"] is None else _count(data["rank"]),
        world_size=_count(data["world_size"]),
        step=str(data["step"]),
        steps=_count(data["steps"]),
        seen_steps=_count(data["seen_steps"]),
        started=_amount(data["started"]),
        ended=_amount(data["ended"]),
        participants=_count(data["participants"]),
        seconds=_amount(data["seconds"]),
        median_seconds=_amount(data["median_seconds"]),
        profiled_steps=_count(data["profiled_steps"]),
        profiled_seconds=_amount(data["profiled_seconds"]),
        sums=growths(data["sums"]),
        window=None if data["window"] is None else _checked_window(data["window"]),
        window_failure=str(data["window_failure"]),
        slowdowns={str(name): _amount(value) for name, value in data["slowdowns"].items()},
        threads=_count(data["threads"]),
        cpus=mask_of(map(_count, data["cpus"])),
        busy_cpus=_busy_cpus(data["busy_threads"]),
        threads_beside=sum(each >= BUSY_THREAD for each in beside),
        cpus_beside=min(sum(beside), float(len(beside))),
        loader_workers=None if data["loader_workers"] is None else _count(data["loader_workers"]),
        prefetched=_count(data["prefetched"]),
        batch_bytes=_count(data["batch_bytes"]),
        fetches={str(name): _amount(value) for name, value in data["fetches"].items()},
        where=Places(
            samples=_count(where["samples"]),
            doing={str(name): _count(count) for name, count in where["doing"].items()},
            places=tuple((str(what), str(place), _count(count)) for what, place, count in where["places"]),
        ),
        pages={_count(node): _count(size) for node, size in data["snapshot"]["pages"].items()},
    )
