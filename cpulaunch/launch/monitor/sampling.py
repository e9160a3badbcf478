"""Snapshots of running workers at intervals, for workers that end without reporting anything themselves."""

from __future__ import annotations

from cpulaunch.system.process_snapshot import snapshot
from cpulaunch.system.process_state import members_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

FIRST_PAUSES = (0.2, 1.0, 3.0)
PAUSE = 10.0
"""Seconds before each sample: a short program is sampled at least once, and a long one cheaply."""

MAX_PROCESSES = 8
"""Sampled per worker, the lowest pids first: the program comes before its DataLoader workers."""

MAX_SIZES = 256
"""Of one process, kept in the order of the samples; of more, every second one is dropped."""

MAX_SNAPSHOTS = 64
"""Kept per worker, most of them of processes that have ended; the one with the lowest peak is dropped first."""

PAGES_SHARE = 0.01
"""The largest share of the time to spend on walking page tables, which delays the process's own memory mappings."""


def pause_before(sample: int) -> float:
    """Seconds between this sample (0: the first) and the one before it, or the start."""
    return FIRST_PAUSES[sample] if sample < len(FIRST_PAUSES) else PAUSE


class Sampler:
    """The latest usable snapshot of each process. `snapshots`: by worker, then by pid.

    `sizes`: by worker and pid, the memory of the process in bytes at each sample.
    """

    def __init__(self, clock: Callable[[], float], take: Callable[..., Mapping[str, Any]] = snapshot) -> None:
        self.snapshots: dict[int, dict[int, Mapping[str, Any]]] = {}
        self.sizes: dict[int, dict[int, list[int]]] = {}
        self.deadline = clock() + pause_before(0)
        self._clock = clock
        self._take = take
        self._samples = 0
        self._next_pages = self._page_seconds = 0.0
        self._left: Iterator[None] | None = None

    def sample(self, groups: Mapping[int, int]) -> None:
        """Effect: if the deadline has passed, takes a snapshot of one process of these groups, given by worker.

        That of the next one is due at once, after what is more urgent: a sample of all may take seconds.
        """
        now = self._clock()
        if now < self.deadline:
            return
        if self._left is None:
            self._left = self._take_sample(dict(groups), now, pages=now >= self._next_pages)
        if next(self._left, self) is self:
            self._left = None

    def _take_sample(self, groups: Mapping[int, int], begun: float, *, pages: bool) -> Iterator[None]:
        """Effect: takes a snapshot at each step, and then sets the next deadline."""
        self._page_seconds = 0.0
        yield from self._take_snapshots(groups, pages=pages)
        self._samples += 1
        if pages:
            self._next_pages = begun + self._page_seconds / PAGES_SHARE
        self.deadline = self._clock() + pause_before(self._samples)

    def _take_snapshots(self, groups: Mapping[int, int], *, pages: bool) -> Iterator[None]:
        members = members_of(frozenset(groups.values()))
        for worker, group in groups.items():
            kept = self.snapshots.setdefault(worker, {})
            for pid in members[group][:MAX_PROCESSES]:
                self._keep_one(kept, pid, pages=pages)
                yield
            sizes = self.sizes.setdefault(worker, {})
            for pid, each in kept.items():
                add_size(sizes.setdefault(pid, []), int(each["rss_bytes"]))
            for pid in sizes.keys() - kept.keys():
                del sizes[pid]

    def _keep_one(self, kept: dict[int, Mapping[str, Any]], pid: int, *, pages: bool) -> None:
        begun = self._clock()
        try:
            keep(kept, self._take(pid, pages=pages), pages=pages)
        except ValueError:  # Nothing that a worker does to its files in /proc may end the launch.
            return
        finally:
            self._page_seconds += self._clock() - begun


def add_size(sizes: list[int], size: int) -> None:
    """Effect: adds a size; of too many, every second one goes."""
    sizes.append(size)
    if len(sizes) > MAX_SIZES:
        del sizes[::2]


def keep(snapshots: dict[int, Mapping[str, Any]], new: Mapping[str, Any], *, pages: bool) -> None:
    """Effect: replaces the process's snapshot by a usable new one; without `pages`, its earlier page counts stay.

    A snapshot of a process that is ending is not usable: it has threads but no memory, or neither.
    """
    if not new["threads"] or not new["rss_bytes"]:
        return
    before = snapshots.get(new["pid"])
    snapshots[new["pid"]] = new if pages or before is None else {**new, "pages": before["pages"]}
    if len(snapshots) > MAX_SNAPSHOTS:
        del snapshots[min(snapshots, key=lambda pid: snapshots[pid]["peak_memory_bytes"] or 0)]
