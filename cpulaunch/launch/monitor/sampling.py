"""Looking at live workers now and then: for those that end without a word of their own."""

from __future__ import annotations

from cpulaunch.launch.process.processes import members_of
from cpulaunch.system.process_snapshot import snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

PAUSES = (0.2, 1.0, 3.0)
LAST_PAUSE = 10.0
"""Seconds before each look: a short program is seen at all, a long one cheaply."""

MOST_PROCESSES = 8
"""Looked at per worker, the oldest ids first: the program comes before its DataLoader workers."""

MOST_KEPT = 64
"""Snapshots kept of one worker, most of processes that have ended: the smallest are forgotten first."""

PAGES_SHARE = 0.01
"""The most of the time that may go into walking page tables, while the process's own changes of its memory wait."""


def pause_before(look: int) -> float:
    """Seconds between a look and the one before, or the start."""
    return PAUSES[look] if look < len(PAUSES) else LAST_PAUSE


class Sampler:
    """Every process's last good snapshot, per worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.snapshots: dict[int, dict[int, Mapping[str, Any]]] = {}
        self.deadline = clock() + pause_before(0)
        self._clock = clock
        self._looks = 0
        self._pages_at = 0.0

    def look(self, groups: Mapping[int, int]) -> None:
        """Effect: if it is time, the members of these workers' process groups are looked at."""
        now = self._clock()
        if now < self.deadline:
            return
        self._look_at(groups, pages=now >= self._pages_at)
        self._looks += 1
        after = self._clock()
        if now >= self._pages_at:
            self._pages_at = now + (after - now) / PAGES_SHARE
        self.deadline = after + pause_before(self._looks)

    def _look_at(self, groups: Mapping[int, int], *, pages: bool) -> None:
        members = members_of(frozenset(groups.values()))
        for worker, group in groups.items():
            snapshots = self.snapshots.setdefault(worker, {})
            for pid in members[group][:MOST_PROCESSES]:
                keep(snapshots, snapshot(pid, pages=pages), pages=pages)


def keep(snapshots: dict[int, Mapping[str, Any]], new: Mapping[str, Any], *, pages: bool) -> None:
    """Effect: a good snapshot is the last one of its process; without a look at its pages, they are the earlier ones.

    A process that is ending has threads but no memory any more, or nothing at all.
    """
    if not new["threads"] or not new["rss_bytes"]:
        return
    before = snapshots.get(new["pid"])
    snapshots[new["pid"]] = new if pages or before is None else {**new, "pages": before["pages"]}
    if len(snapshots) > MOST_KEPT:
        del snapshots[min(snapshots, key=lambda pid: snapshots[pid]["peak_memory_bytes"] or 0)]
