"""The page of a run, from its report: what came of it, where it ran, why, and what torch did inside."""

from __future__ import annotations

from cpulaunch.charts.model import Bar
from cpulaunch.html.ceilings import RateFigure, ceilings
from cpulaunch.html.elements.bars import bar_chart
from cpulaunch.html.elements.markup import (
    Markup,
    bullets,
    bytes_text,
    code,
    element,
    listed,
    number_text,
    scrolling,
    table,
    value_of,
)
from cpulaunch.html.environment import environment_section
from cpulaunch.html.inside_torch import torch_parts
from cpulaunch.html.page import Headline, Tile, page, section
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import count_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from cpulaunch.records.host import Calibration

    Json = Mapping[str, Any]


MAX_CHARTS = 12
"""Metrics whose values are drawn."""
PER_OBJECT = frozenset({"ipex", "data_loading", "channels_last", "fused_optimizers"})
"""Settings that apply to each module, loader or optimizer: what is said of one does not hold for all."""


def run_page(report: Json, *, machine: str, core_map: str | None = None, calibration: Calibration | None = None) -> str:
    """The page of a report. `machine`: its processor, in a line; `core_map`: its picture, as an SVG element.

    `calibration`: what was measured on it.
    """
    sections = [
        _live_findings(report),
        _metrics(report),
        _warnings(report),
        _workers(report),
        _map(core_map),
        ceilings(
            calibration,
            [
                RateFigure(label="all workers", metric=name, value=each["sum"])
                for name, each in report["metrics"].items()
            ],
        ),
        *(section(title, content) for title, content in torch_parts(report["workers"])),
        _decisions(report["plan"]),
        environment_section(report["plan"]),
    ]
    made_by = f"cpulaunch {report['cpulaunch']} on {report['host']}, {machine}."
    return page(
        f"cpulaunch: {_program(report['plan'])}",
        _verdict(report),
        _tiles(report),
        sections,
        footer=f"{made_by} --report FILE writes the same facts as data.",
    )


def _program(plan: Json) -> str:
    workers = plan["workers"]
    return " ".join(workers[0]["argv"]) if workers else ""


def _verdict(report: Json) -> Headline:
    workers = report["workers"]
    failed = [each for each in workers if each["exit_code"] != 0]
    seconds = report["wall_seconds"]
    after = "" if seconds is None else f" after {_seconds(seconds)}"
    details = tuple(_findings(report))
    if report["exit_code"] == 0:
        return Headline(text=f"Succeeded{after}.", tone="good", details=details)
    ends = ", ".join(_end(each) for each in failed[:4]) + (", …" if failed[4:] else "")
    named = f": {ends}" if failed else ""
    return Headline(text=f"Failed with exit code {report['exit_code']}{after}{named}.", tone="bad", details=details)


def _end(worker: Json) -> str:
    if worker["signal"] is not None:
        return f"worker {worker['index']} was killed by signal {worker['signal']}"
    return f"worker {worker['index']} ended with exit code {worker['exit_code']}"


def _findings(report: Json) -> Iterable[str]:
    """Sentences on what did not go as planned; one that says so if everything did."""
    workers = report["workers"]
    lost = sum(each["plugin"] == "not loaded" for each in workers)
    moved = sum((each["binding"] or {}).get("as_planned") is False for each in workers)
    degraded = {name for each in workers for name, end in each["settings"].items() if end["state"] == "degraded"}
    partial = {name for name in degraded if _may_be_partial(name, workers)}
    if lost:
        yield f"{count_text(lost, 'worker')} of {len(workers)} did not load cpulaunch's plugin into torch."
    if moved:
        yield f"Threads of {count_text(moved, 'worker')} left the planned CPUs."
    if degraded - partial:
        yield f"Not in force: {listed(_extent(name, workers) for name in sorted(degraded - partial))}."
    if partial:
        yield f"Not in force everywhere: {listed(_extent(name, workers) for name in sorted(partial))}."
    if not (lost or moved or degraded) and workers:
        bound = any((each["binding"] or {}).get("as_planned") for each in workers)
        yield "Every setting is in force" + (", and all threads stayed on the planned CPUs." if bound else ".")


def _may_be_partial(name: str, workers: Iterable[Json]) -> bool:
    """Whether a setting that was refused for one object may be in force for others; of graphs it is known."""
    return any(each["graph"]["captured"] for each in workers) if name == "graph" else name in PER_OBJECT


def _extent(name: str, workers: Iterable[Json]) -> str:
    """The name of a setting with what it is in force for, as far as workers report that."""
    if name != "graph":
        return name
    graphs = [worker["graph"] for worker in workers]
    captured, eager = (sum(len(graph[key]) for graph in graphs) for key in ("captured", "eager"))
    return f"graph ({count_text(captured, 'graph')} captured, {count_text(eager, 'module')} not)"


def _tiles(report: Json) -> Iterable[Tile]:
    for name, metric in list(report["metrics"].items())[:4]:
        known = sum(value is not None for value in metric["values"])
        yield Tile(value=number_text(metric["sum"]), label=name if known < 2 else f"{name}, sum of {known} workers")
    plan = report["plan"]
    threads = sum(worker["threads"] or 0 for worker in plan["workers"])
    yield Tile(value=str(len(report["workers"])), label="worker" if len(report["workers"]) == 1 else "workers")
    yield Tile(value=str(threads), label="compute threads")
    peaks = [each["peak_memory_bytes"] for each in report["workers"] if each["peak_memory_bytes"] is not None]
    if peaks and bytes_text(max(peaks)):
        yield Tile(value=bytes_text(max(peaks)), label="peak memory of the largest process")


def _seconds(value: object) -> str:
    return f"{number_text(value)} s"


def _metrics(report: Json) -> Markup:
    """Bars of each metric that several workers have."""
    charts = []
    for name, metric in report["metrics"].items():
        pairs = zip(report["workers"], metric["values"], strict=False)
        bars = [Bar(label=f"worker {worker['index']}", value=value) for worker, value in pairs if value is not None]
        if len(bars) > 1:
            charts.append(bar_chart(f"{name}: {number_text(metric['sum'])} in sum", bars))
    left = f"{len(charts) - MAX_CHARTS:,} more metrics are left out." if len(charts) > MAX_CHARTS else ""
    note = element("p", left, _class="note") if left else Markup()
    return section("Figures of each worker", *charts[:MAX_CHARTS], note)


def _live_findings(report: Json) -> Markup:
    """What made the run slow, as far as its workers and the kernel told."""
    rows = [
        [
            f"{'' if each['workers'] else 'the launch'}{format_cpulist(each['workers'])}",
            value_of(each["text"]),
            value_of(each["fix"]),
            code(each["rule"]),
        ]
        for each in report["findings"]
    ]
    heads = ("Workers", "What was seen", "Remedy", "Finding")
    return section("What made it slow", table("What was seen while it ran", heads, rows))


def _warnings(report: Json) -> Markup:
    texts = [*report["plan"]["warnings"], *(text for worker in report["workers"] for text in worker["warnings"])]
    return section("Warnings", bullets(dict.fromkeys(map(str, texts))))


def _workers(report: Json) -> Markup:
    plans = {worker["index"]: worker for worker in report["plan"]["workers"]}
    heads = (
        "Worker",
        "CPUs",
        "Threads",
        "NUMA nodes",
        "Time",
        "Peak memory",
        "Exit",
        "On its CPUs",
        "OpenMP",
        "Allocator",
    )
    rows = [_worker_row(worker, plans.get(worker["index"], {})) for worker in report["workers"]]
    return section("Workers", table("Where each worker ran, and how it ended", heads, rows, numeric=(2, 4, 5)))


def _worker_row(worker: Json, plan: Json) -> list[object]:
    binding = worker["binding"] or {}
    name = str(worker["index"]) if "rank" not in worker else f"{worker['index']} (rank {worker['rank']})"
    end = f"signal {worker['signal']}" if worker["signal"] is not None else worker["exit_code"]
    stayed = {True: "yes", False: "no", None: "not known"}[binding.get("as_planned")]
    return [
        name,
        code(plan.get("cpus") or "not bound"),
        plan.get("threads", ""),
        plan.get("numa_nodes") or "",
        "" if worker["wall_seconds"] is None else _seconds(worker["wall_seconds"]),
        bytes_text(worker["peak_memory_bytes"]),
        end,
        stayed,
        value_of(binding.get("openmp_runtime") or "not known"),
        value_of(binding.get("allocator") or "not known"),
    ]


def _map(core_map: str | None) -> Markup:
    return Markup() if core_map is None else section("Cores", scrolling("Map of the cores", Markup(core_map)))


def _decisions(plan: Json) -> Markup:
    rows = [
        [code(note["setting"]), code(note["value"]), value_of(note["origin"]), value_of(note["reason"])]
        for note in plan["notes"]
        if note["setting"].islower()
    ]
    heads = ("Setting", "Value", "From", "Reason")
    return section("Decisions", table("Every setting with its origin and reason", heads, rows))
