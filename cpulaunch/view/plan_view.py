"""A plan as text for a person and as JSON."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan, Note, WorkerPlan
from cpulaunch.view.job_view import job_json, job_title
from cpulaunch.view.machine_map import machine_map
from cpulaunch.view.text import painter, wrapped

MOST_ROWS = 32
"""At most this many workers are listed; of the others only the number is shown."""
Column = tuple[str, Callable[[WorkerPlan], str]]


def plan_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan as JSON-ready data, schema 1."""
    return {
        "schema": 1,
        "mode": plan.mode,
        "profile": plan.profile,
        "world_size": plan.world_size,
        "workers": [_worker_json(worker) for worker in plan.workers],
        "notes": [
            {"setting": note.setting, "value": note.value, "origin": note.origin, "reason": note.reason}
            for note in plan.notes
        ],
        "warnings": list(plan.warnings),
        "job": job_json(plan.job),
    }


def _worker_json(worker: WorkerPlan) -> dict[str, Any]:
    return {
        "index": worker.index,
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "cpus": format_cpulist(worker.cpus),
        "loader_cpus": format_cpulist(worker.loader_cpus),
        "ccl_cpus": format_cpulist(worker.ccl_cpus),
        "numa_nodes": format_cpulist(worker.numa_nodes),
        "mempolicy": worker.mempolicy,
        "threads": worker.threads,
        "gpu": worker.gpu,
        "env": dict(worker.env),
        "argv": list(worker.argv),
    }


def plan_text(plan: LaunchPlan, host: Host, *, width: int, color: bool) -> str:
    """The plan for a person: workers, the map of their cores, every value with its reason, warnings."""
    bold = painter("bold", color=color)
    blocks = [
        *_workers_and_map(plan, host, width=width, color=color),
        *(
            "\n".join([bold(heading), *_note_lines(notes, width=width, color=color)])
            for heading, notes in _groups(plan.notes)
        ),
        "\n".join(_warning_lines(plan.warnings, width=width, color=color)),
    ]
    return "\n\n".join(block for block in blocks if block)


def brief_text(plan: LaunchPlan, host: Host, *, width: int, color: bool) -> str:
    """The workers and the map of their cores, without reasons and warnings."""
    return "\n\n".join(filter(None, _workers_and_map(plan, host, width=width, color=color)))


def _workers_and_map(plan: LaunchPlan, host: Host, *, width: int, color: bool) -> list[str]:
    bold = painter("bold", color=color)
    return [
        bold(escaped(_title(plan))),
        "\n".join(_worker_table(plan.workers, bold=bold)),
        core_map(plan, host, width=width, color=color),
    ]


def _title(plan: LaunchPlan) -> str:
    if plan.job is not None:
        workers = job_title(plan, plan.job)
    else:
        workers = "1 worker" if plan.world_size == 1 else f"{plan.world_size} instances"
        if len(plan.workers) < plan.world_size:
            workers += f", {len(plan.workers)} started here"
    return f"{workers}, profile {plan.profile}" if plan.profile else workers


def _worker_table(workers: Sequence[WorkerPlan], *, bold: Any) -> Iterable[str]:
    ranks = any(worker.local_rank is not None for worker in workers)
    first: Column = ("rank" if ranks else "worker", _number)
    columns = [first]
    columns += [column for column in _COLUMNS if column[0] not in _OPTIONAL or any(map(_OPTIONAL[column[0]], workers))]
    rows = [tuple(heading for heading, _ in columns)]
    rows += [tuple(cell(worker) for _, cell in columns) for worker in workers[:MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        yield bold(line) if number == 0 else line
    if len(workers) > MOST_ROWS:
        yield f"… and {len(workers) - MOST_ROWS} more (--json lists all)"
    if workers and workers[0].argv:
        from shlex import join

        yield escaped(f"command: {join(workers[0].argv)}")


def _number(worker: WorkerPlan) -> str:
    """The worker's number: its rank; its local rank while the rank is not known; its index if it is no rank."""
    if worker.local_rank is not None and worker.rank is None:
        return f"local rank {worker.local_rank}"
    return str(worker.index if worker.rank is None else worker.rank)


def _memory(worker: WorkerPlan) -> str:
    if worker.mempolicy == "none":
        return "first touch"
    return f"{worker.mempolicy} {format_cpulist(worker.numa_nodes)}"


_COLUMNS: tuple[Column, ...] = (
    ("CPUs", lambda worker: format_cpulist(worker.cpus) or "not bound"),
    ("memory", _memory),
    ("threads", lambda worker: str(worker.threads)),
    ("GPU", lambda worker: "-" if worker.gpu is None else str(worker.gpu)),
    ("DataLoader CPUs", lambda worker: format_cpulist(worker.loader_cpus) or "-"),
    ("oneCCL CPUs", lambda worker: format_cpulist(worker.ccl_cpus) or "-"),
)
_OPTIONAL: dict[str, Callable[[WorkerPlan], bool]] = {
    "GPU": lambda worker: worker.gpu is not None,
    "DataLoader CPUs": lambda worker: bool(worker.loader_cpus),
    "oneCCL CPUs": lambda worker: bool(worker.ccl_cpus),
}
"""Columns that are shown only if at least one worker has a value for them."""


def core_map(plan: LaunchPlan, host: Host, *, width: int, color: bool) -> str:
    """The machine's map with the worker that runs on each core; empty if workers share CPUs or are not bound."""
    owners = core_owners(plan)
    if not owners:
        return ""
    return machine_map(host, width=width, color=color, owners=owners, marks=_marks(plan, host))


def core_owners(plan: LaunchPlan) -> dict[int, int]:
    """The worker that runs on each CPU; empty if workers share CPUs or are not bound."""
    owners = {cpu: worker.index for worker in plan.workers for cpu in worker.all_cpus}
    return {} if len(owners) < sum(len(worker.all_cpus) for worker in plan.workers) else owners


def _marks(plan: LaunchPlan, host: Host) -> dict[int, str]:
    """CPUs of cores without compute threads that run something else for a worker, each with a letter of MARKS."""
    cores = {cpu.id: cpu.core for cpu in host.cpus}
    computing = {cores[cpu] for worker in plan.workers for cpu in worker.cpus if cpu in cores}
    kinds = (("l", worker.loader_cpus) for worker in plan.workers), (("c", worker.ccl_cpus) for worker in plan.workers)
    marked = [(cpu, letter) for kind in kinds for letter, cpus in kind for cpu in cpus]
    return {cpu: letter for cpu, letter in marked if cores.get(cpu) not in computing}


def _groups(notes: Sequence[Note]) -> Iterable[tuple[str, list[Note]]]:
    settings = [note for note in notes if note.setting.islower()]
    variables = [note for note in notes if not note.setting.islower()]
    return [(heading, group) for heading, group in (("settings", settings), ("environment", variables)) if group]


def _note_lines(notes: Sequence[Note], *, width: int, color: bool) -> Iterable[str]:
    dim = painter("dim", color=color)
    name_width = max(len(note.setting) for note in notes)
    for note in notes:
        value = "(unset)" if note.value is None else note.value
        origin = "" if note.origin == "default" else f" [{note.origin}]"
        head = escaped(f"  {note.setting.ljust(name_width)}  {value}{origin}")
        indent = " " * (name_width + 4)
        if len(head) + len(note.reason) + 3 <= width:
            yield f"{head} {dim('- ' + escaped(note.reason))}"
            continue
        yield head
        for line in wrapped(note.reason, width - len(indent)):
            yield dim(indent + line)


def _warning_lines(warnings: Sequence[str], *, width: int, color: bool) -> Iterable[str]:
    paint = painter("yellow", color=color)
    for warning in warnings:
        first, *rest = wrapped(f"warning: {warning}", width, indent=2)
        yield paint(first)
        yield from rest
