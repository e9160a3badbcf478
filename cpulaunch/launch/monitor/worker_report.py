"""A worker's report on itself, from the events in its file. Any process may write anything there.

What no event is, or too large, is counted and otherwise ignored.
"""

from __future__ import annotations

import json

from cpulaunch.records.plan import LARGEST_METRIC
from cpulaunch.records.record import field, record, replace
from cpulaunch.system.files.reading import read_lines_at_ends

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

MAX_BYTES = 1 << 24
"""Read of an event file. Of a larger one both ends count: settings are reported first, and the last metrics last."""
MAX_LINE = 1 << 20
"""Characters of an event. The largest are snapshots of processes with thousands of threads."""
MAX_DEPTH = 16
"""Of lists and objects in an event. Python reads deeper ones than it can write, and recorded ones have at most five."""
MAX_MALFORMED = 10_000
"""A file with more malformed lines is not one of events, and the rest of it is ignored."""
MAX_METRICS, MAX_METRIC_NAME = 1000, 256
"""Names of metrics in a file, and characters of one: each name is a line on the terminal."""
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
    """Lines that are no events, or metrics beyond their limits."""
    unread_bytes: int = 0


def read_event_file(path: str) -> WorkerReport:
    """The report in a worker's event file; an empty one if there is no regular file at the path."""
    try:
        lines, unread_bytes = read_lines_at_ends(path, max_bytes=MAX_BYTES)
    except OSError:
        return WorkerReport()
    return replace(read_worker_report(lines), unread_bytes=unread_bytes)


def read_worker_report(lines: Iterable[str]) -> WorkerReport:
    """The report that the lines of an event file add up to; malformed lines are counted."""
    collected = _Collected()
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
    if not isinstance(event, dict) or not isinstance(event.get("pid"), int) or _is_deeper(event, MAX_DEPTH):
        return None
    return event if isinstance(event.get("event"), str) else None


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects are nested in this value more than so many times."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(each, depth - 1) for each in parts)


def _float(text: str) -> float | None:
    """The number; None if it is too large, such as 1e999, which Python reads as infinite."""
    value = float(text)
    return value if abs(value) <= LARGEST_METRIC else None


def _int(text: str) -> int | None:
    value = int(text)
    return value if abs(value) <= LARGEST_METRIC else None


class _Collected:
    """The events so far, which must be added in the order in which they were written."""

    def __init__(self) -> None:
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

    def add(self, event: dict[str, Any]) -> bool:
        """Whether the event has the form of its kind. Effect: adds it; those of unknown kinds are of other versions."""
        kind, pid = event["event"], event["pid"]
        facts = {name: value for name, value in event.items() if name != "event"}
        if self.main_pid is None and kind not in PROGRAM_EVENTS:
            self.main_pid = pid
        if kind in ("applied", "degraded"):
            self._add_setting(pid, kind, facts)
        elif kind in ("captured", "eager"):
            self._add_module(self.captured if kind == "captured" else self.eager, facts)
        elif kind == "chosen":
            self.chosen.append(facts)
        elif kind in ("weights", "accuracy"):
            self.weights.append(facts)
        elif kind == "captures":
            self.captures[pid] = facts
        elif kind == "warning":
            self.warnings[str(facts.get("text", ""))] = None
        elif kind == "metric":
            return self._add_metric(facts)
        elif kind == "checksum":
            return self._add_checksum(facts)
        elif kind == "live":
            self.live[pid] = facts
        elif kind == "conditions":
            self.conditions[pid] = facts
        return True

    def _add_setting(self, pid: int, state: str, facts: dict[str, Any]) -> None:
        """Effect: keeps the main process's last state of a setting, or another process's if the main one has none."""
        name = str(facts.get("setting", ""))
        detail = str(facts.get("reason" if state == "degraded" else "detail", ""))
        if pid == self.main_pid or name not in self.settings or self.settings[name][0] != self.main_pid:
            self.settings[name] = (pid, {"state": state, "detail": detail})

    @staticmethod
    def _add_module(modules: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
        """Effect: lists the module once, although every process of a worker may report it."""
        del facts["pid"]
        modules.setdefault(json.dumps(facts, sort_keys=True), facts)

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
        self.checksums[name] = tuple(parts)
        return True

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
