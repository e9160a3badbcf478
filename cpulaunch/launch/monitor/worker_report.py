"""What a worker told its launch: made of the events in its file, into which any process may write anything."""

from __future__ import annotations

import json

from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

BY_THE_PROGRAM = ("metric",)
"""Events that say nothing of the plugin: the program itself causes them."""


@record
class WorkerReport:
    """One worker's own words. `main_pid` is the process that loaded the plugin first (None: none did)."""

    main_pid: int | None = None
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Per setting: {"state": "applied" | "degraded", "detail": why or how}."""
    captured: tuple[Mapping[str, Any], ...] = ()
    eager: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    live: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Per process: what it last said of itself."""


def read_worker_report(lines: Iterable[str]) -> WorkerReport:
    """What the lines of an events file amount to; malformed ones count for nothing."""
    told = _Collected()
    for line in lines:
        event = _event(line)
        if event is not None:
            told.add(event)
    return told.sum()


def _event(line: str) -> dict[str, Any] | None:
    """The event of a line; None for what is none, as of a process killed while it wrote."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity are no JSON.
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("pid"), int):
        return None
    return event if isinstance(event.get("event"), str) else None


class _Collected:
    """Events so far, in the order they were told."""

    def __init__(self) -> None:
        self.main_pid: int | None = None
        self.settings: dict[str, tuple[int, dict[str, str]]] = {}
        self.captured: list[dict[str, Any]] = []
        self.eager: list[dict[str, Any]] = []
        self.warnings: dict[str, None] = {}
        self.metrics: dict[str, float] = {}
        self.live: dict[int, dict[str, Any]] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Effect: the event counts."""
        kind, pid = event["event"], event["pid"]
        facts = {name: value for name, value in event.items() if name != "event"}
        if self.main_pid is None and kind not in BY_THE_PROGRAM:
            self.main_pid = pid
        if kind in ("applied", "degraded"):
            self._setting(pid, kind, facts)
        elif kind in ("captured", "eager"):
            self._module(self.captured if kind == "captured" else self.eager, facts)
        elif kind == "warning":
            self.warnings[str(facts.get("text", ""))] = None
        elif kind == "metric":
            self._metric(facts)
        elif kind == "live":
            self.live[pid] = facts

    def _setting(self, pid: int, state: str, facts: dict[str, Any]) -> None:
        """Effect: the main process's last word counts, or any other's where it said nothing."""
        name = str(facts.get("setting", ""))
        detail = str(facts.get("reason" if state == "degraded" else "detail", ""))
        if pid == self.main_pid or name not in self.settings or self.settings[name][0] != self.main_pid:
            self.settings[name] = (pid, {"state": state, "detail": detail})

    @staticmethod
    def _module(modules: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Effect: it is listed, once: every process of a worker may say the same."""
        del facts["pid"]
        if facts not in modules:
            modules.append(facts)

    def _metric(self, facts: dict[str, Any]) -> None:
        name, value = facts.get("name"), facts.get("value")
        if isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool):
            self.metrics[name] = float(value)

    def sum(self) -> WorkerReport:
        """What was told so far."""
        return WorkerReport(
            main_pid=self.main_pid,
            settings={name: setting for name, (_, setting) in self.settings.items()},
            captured=tuple(self.captured),
            eager=tuple(self.eager),
            warnings=tuple(self.warnings),
            metrics=self.metrics,
            live=self.live,
        )
