"""A worker's report on itself, from the events in its file. Any process may write anything there.

What no event is, or too large, is counted and otherwise ignored.
"""

from __future__ import annotations

import json

from cpulaunch.launch.process.run_directory import in_run_directory
from cpulaunch.records.plan import LARGEST_METRIC
from cpulaunch.records.record import field, record, replace
from cpulaunch.system.files.reading import is_marked_lost, read_lines_at_ends

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, TypeVar

    Key = TypeVar("Key")
    Value = TypeVar("Value")

MAX_BYTES = 1 << 24
"""Read of an event file. Of a larger one both ends count: settings are reported first, and the last metrics last."""
MAX_LINE = 1 << 20
"""Characters of an event. The largest are snapshots of processes with thousands of threads."""
MAX_DEPTH = 8
"""Of lists and objects in an event. Python reads deeper ones than it can write, and recorded ones have at most five."""
MAX_VALUES, MAX_ALL_VALUES = 1 << 16, 1 << 20
"""In lists and objects of an event, and of all events: each is two bytes in a file, but a line of a report. The largest
checksum has about 26,000, in 13 bytes each."""
MAX_LAUNCH_BYTES, MAX_LAUNCH_VALUES = 1 << 28, 1 << 22
"""Read of the event files of all workers of a launch, and values in their events: each worker has an equal part.

A value may take 200 bytes of memory. Up to 256 workers, an event as large as any fits into each one's part.
"""
MAX_PARTS_VALUES = 1 << 24
"""Values in all parts that are larger than an equal one for that."""
MAX_PID = 1 << 22
"""Python's hashes of larger numbers can be made to collide. Source: Linux, include/linux/threads.h, PID_MAX_LIMIT."""
MAX_ENTRIES = 10_000
"""Modules, choices, processes, names and the like of each kind."""
MAX_MALFORMED = 10_000
"""A file with more malformed lines is not one of events, and the rest of it is ignored."""
MAX_METRICS, MAX_METRIC_NAME = 1000, 256
"""Names of metrics in a file, and characters of one: each name is a line on the terminal."""
MODULE_FIELDS = {
    "captured": ("module", "signature", "engine", "seconds", "error", "speedup", "frozen_bytes"),
    "eager": ("module", "reason"),
}
LIVE_FIELDS = (
    *("pid", "command", "threads", "pages", "openmp", "openmp_runtime", "openmp_path", "allocator", "allocator_path"),
    *("peak_memory_bytes", "rss_bytes"),
)
"""What docs/json.md describes; other fields of an event are not kept."""
REPLACING_EVENTS = ("checksum", "live", "captures", "conditions")
"""Events that replace earlier ones: of their name, or of their pid."""
PROGRAM_EVENTS = ("metric", "checksum")
"""Events that do not show that the plugin is loaded: the program causes them."""


@record
class WorkerReport:
    """What one worker reported. `main_pid` is the process that loaded the plugin first; None if none did."""

    main_pid: int | None = None
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By setting: {"state": "applied" | "degraded", "detail": how or why}."""
    captured: tuple[Mapping[str, Any], ...] = ()
    eager: tuple[Mapping[str, Any], ...] = ()
    chosen: tuple[Mapping[str, Any], ...] = ()
    """The modes chosen for modules, in the order of the choices."""
    weights: tuple[Mapping[str, Any], ...] = ()
    """Events on weights kept in another type and on their accuracy, each with the pid of its process."""
    captures: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By pid: the last word on the seconds that captures took."""
    warnings: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    checksums: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    """By name: the parts of an output, as `worker/reporting/checksums.py` describes them."""
    live: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By pid: the last snapshot that the process took of itself."""
    conditions: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By pid: what inside torch made it slow, as `worker/reporting/conditions.py` describes it."""
    ignored: int = 0
    """Lines that are no events, or beyond the limits of their kind."""
    unread_bytes: int = 0
    lost: bool = False
    """Whether an event could not be written, as for want of space."""


def read_event_file(path: str, *, workers: int = 1) -> WorkerReport:
    """The report in the event file of one of so many workers; an empty one if there is no regular file at the path."""
    name, folder = in_run_directory(path)
    max_bytes = min(MAX_BYTES, MAX_LAUNCH_BYTES // workers)
    try:
        lines, unread_bytes = read_lines_at_ends(name, max_bytes=max_bytes, folder=folder)
    except OSError:
        return WorkerReport()
    found = read_worker_report(lines, max_values=_values_of_one(workers))
    return replace(found, unread_bytes=unread_bytes, lost=is_marked_lost(name, folder=folder))


def _values_of_one(workers: int) -> int:
    """How many values count of one of so many workers."""
    return min(MAX_ALL_VALUES, max(MAX_VALUES, MAX_LAUNCH_VALUES // workers), MAX_PARTS_VALUES // workers)


def read_worker_report(lines: Iterable[str], *, max_values: int = MAX_ALL_VALUES) -> WorkerReport:
    """The report that the lines of an event file add up to; malformed lines are counted."""
    collected = _Collected(max_values)
    ignored = 0
    for line in lines:
        if not line or line == "\n":
            continue
        event = _parse(line) if ignored < MAX_MALFORMED and len(line) <= MAX_LINE else None
        if event is None or not collected.add(event):
            ignored += 1
    return replace(collected.report(), ignored=ignored)


def _parse(line: str) -> dict[str, Any] | None:
    """The event in a line; None if it holds none, as after a kill in the middle of a write."""
    try:
        event = json.loads(line, parse_constant=lambda _: None, parse_float=_float, parse_int=_int)
    except (ValueError, RecursionError):  # The latter for lists in lists, a thousand deep.
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    pid = event.get("pid")
    return event if isinstance(pid, int) and not isinstance(pid, bool) and 0 < pid <= MAX_PID else None


def _values(event: dict[str, Any]) -> int | None:
    """How many values the lists and objects in an event have together; None if they are nested too deep."""
    count = 0
    level: list[object] = list(event.values())
    for _ in range(MAX_DEPTH):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in nested for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return count
        count += len(level)
    return None if any(isinstance(each, dict | list) for each in level) else count


def _float(text: str) -> float | None:
    """The number; None if it is too large, such as 1e999, which Python reads as infinite."""
    value = float(text)
    return value if abs(value) <= LARGEST_METRIC else None


def _int(text: str) -> int | None:
    value = int(text)
    return value if abs(value) <= LARGEST_METRIC else None


class _Collected:
    """The events so far, which must be added in the order in which they were written."""

    def __init__(self, max_values: int) -> None:
        self.main_pid: int | None = None
        self.settings: dict[str, tuple[int, dict[str, str]]] = {}
        self.captured: dict[str, dict[str, Any]] = {}
        self.eager: dict[str, dict[str, Any]] = {}
        self.chosen: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []
        self.captures: dict[int, dict[str, Any]] = {}
        self.warnings: dict[str, None] = {}
        self.metrics: dict[str, float] = {}
        self.checksums: dict[str, tuple[dict[str, Any], ...]] = {}
        self.live: dict[int, dict[str, Any]] = {}
        self.conditions: dict[int, dict[str, Any]] = {}
        self._values_left = max_values
        self._replaceable: dict[tuple[str, str | int], int] = {}
        """How many of these values a later event of its kind, and of this name or pid, replaces."""

    def add(self, event: dict[str, Any]) -> bool:
        """Whether the event has the form of its kind, and is within the limits.

        Effect: adds it; those of unknown kinds are of other versions.
        """
        kind, pid = event["event"], event["pid"]
        key = (kind, str(event.get("name")) if kind == "checksum" else pid)
        replaced = self._replaceable.get(key, 0)
        values = _values(event)
        if values is None or values > min(MAX_VALUES, self._values_left + replaced):
            return False
        if not self._keep(kind, pid, {name: value for name, value in event.items() if name != "event"}):
            return False
        self._values_left -= values - replaced
        if kind in REPLACING_EVENTS:
            self._replaceable[key] = values
        return True

    def _keep(self, kind: str, pid: int, facts: dict[str, Any]) -> bool:
        """Whether the facts have the form of their kind, and there is room for them. Effect: adds them."""
        if self.main_pid is None and kind not in PROGRAM_EVENTS:
            self.main_pid = pid
        if kind in ("applied", "degraded"):
            return self._add_setting(pid, kind, facts)
        if kind in MODULE_FIELDS:
            return _put(self.captured if kind == "captured" else self.eager, *_module(kind, facts))
        if kind in ("chosen", "weights", "accuracy"):
            return _append(self.chosen if kind == "chosen" else self.weights, facts)
        if kind == "captures":
            return _put(self.captures, pid, facts)
        if kind == "warning":
            return _put(self.warnings, str(facts.get("text", "")), None)
        if kind == "metric":
            return self._add_metric(facts)
        if kind == "checksum":
            return self._add_checksum(facts)
        if kind == "live":
            return _put(self.live, pid, {name: facts[name] for name in LIVE_FIELDS if name in facts})
        return kind != "conditions" or _put(self.conditions, pid, facts)

    def _add_setting(self, pid: int, state: str, facts: dict[str, Any]) -> bool:
        """Effect: keeps the main process's last state of a setting, or another process's if the main one has none."""
        name = str(facts.get("setting", ""))
        detail = str(facts.get("reason" if state == "degraded" else "detail", ""))
        if pid == self.main_pid or name not in self.settings or self.settings[name][0] != self.main_pid:
            return _put(self.settings, name, (pid, {"state": state, "detail": detail}))
        return True

    def _add_metric(self, facts: dict[str, Any]) -> bool:
        name, value = facts.get("name"), facts.get("value")
        if not isinstance(name, str) or not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if len(name) > MAX_METRIC_NAME or (len(self.metrics) >= MAX_METRICS and name not in self.metrics):
            return False
        self.metrics[name] = float(value)
        return True

    def _add_checksum(self, facts: dict[str, Any]) -> bool:
        name, parts = facts.get("name"), facts.get("value")
        if (
            not isinstance(name, str)
            or not isinstance(parts, list)
            or not all(isinstance(each, dict) for each in parts)
        ):
            return False
        return _put(self.checksums, name, tuple(parts))

    def report(self) -> WorkerReport:
        """The report on all events so far."""
        return WorkerReport(
            main_pid=self.main_pid,
            settings={name: setting for name, (_, setting) in self.settings.items()},
            captured=tuple(self.captured.values()),
            eager=tuple(self.eager.values()),
            chosen=tuple(self.chosen),
            weights=tuple(self.weights),
            captures=self.captures,
            warnings=tuple(self.warnings),
            metrics=self.metrics,
            checksums=self.checksums,
            live=self.live,
            conditions=self.conditions,
        )


def _module(kind: str, facts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A key and the documented fields of a module, which is listed once, although several processes may report it."""
    known = {
        name: facts[name] for name in MODULE_FIELDS[kind] if name in facts and not isinstance(facts[name], dict | list)
    }
    return json.dumps(known, sort_keys=True), known


def _put(entries: dict[Key, Value], key: Key, value: Value) -> bool:
    """Whether there is room for the entry. Effect: makes it, or replaces an older one."""
    if key not in entries and len(entries) >= MAX_ENTRIES:
        return False
    entries[key] = value
    return True


def _append(entries: list[dict[str, Any]], facts: dict[str, Any]) -> bool:
    if len(entries) >= MAX_ENTRIES:
        return False
    entries.append(facts)
    return True
