"""The report on a run, and its lines for the terminal. What a worker reports itself wins over samples of it."""

from __future__ import annotations

from cpulaunch.launch.monitor.worker_report import WorkerReport
from cpulaunch.launch.output.metrics import metric_line, metric_name, totals
from cpulaunch.launch.supervision.findings import findings_json
from cpulaunch.launch.supervision.module_report import chosen_report, graph_report, module_lines, weights_report
from cpulaunch.records.cpulist import format_cpulist, parse_cpulist
from cpulaunch.records.errors import escaped, quoted
from cpulaunch.records.host import count_text
from cpulaunch.records.settings import PLUGIN_SETTINGS, setting_specs
from cpulaunch.records.torch_settings import VARIABLE, decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.launch.monitor.watch import Observation
    from cpulaunch.launch.supervision.findings import RunFinding
    from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
    from cpulaunch.records.plan import LaunchPlan, WorkerPlan


MAX_METRIC_LINES = 100
"""On the terminal; the report has all metrics."""
MAX_PATH = 4096
"""Characters of a path on the terminal. Source: Linux, include/uapi/linux/limits.h."""
MAX_MASKS = 1 << 12
"""Different masks of one process's threads that are looked at."""


def report(
    plan: LaunchPlan,
    result: LaunchResult,
    *,
    version: str,
    plan_json: Mapping[str, Any],
    found: Sequence[RunFinding] = (),
) -> dict[str, Any]:
    """The report as JSON data, schema 1."""
    metrics = [_metrics(plan, worker) for worker in result.workers]
    plans = {worker.index: worker for worker in plan.workers}
    return {
        "schema": 1,
        "cpulaunch": version,
        "host": result.host,
        "exit_code": result.exit_code,
        "wall_seconds": _rounded(result.wall_seconds),
        "world_size": plan.world_size,
        **({} if result.attempts is None else {"attempts": result.attempts[0]}),
        "metrics": {name: {"sum": total, "values": list(values)} for name, (total, values) in totals(metrics).items()},
        "findings": findings_json(found),
        "plan": plan_json,
        "workers": [
            _worker_report(worker, plans[worker.index], own_metrics)
            for worker, own_metrics in zip(result.workers, metrics, strict=True)
        ],
    }


def _worker_report(worker: WorkerResult, plan: WorkerPlan, metrics: Mapping[str, float]) -> dict[str, Any]:
    observation = worker.observation
    reported = None if observation is None else observation.report
    modules = reported or WorkerReport()
    return {
        "index": worker.index,
        **({} if worker.rank is None else {"rank": worker.rank}),
        "pid": worker.pid,
        "exit_code": worker.exit_code,
        "signal": worker.signal,
        "wall_seconds": None if observation is None else _rounded(observation.wall_seconds),
        "peak_memory_bytes": None if observation is None else peak_memory_bytes(observation),
        "plugin": "loaded" if reported is not None and reported.main_pid is not None else "not loaded",
        "settings": {} if reported is None else dict(reported.settings),
        "graph": graph_report(modules),
        "chosen": chosen_report(modules),
        "weights": weights_report(modules),
        "binding": None if observation is None else binding(observation, worker, plan),
        "metrics": dict(metrics),
        "checksums": {name: [dict(part) for part in parts] for name, parts in modules.checksums.items()},
        "warnings": [] if reported is None else list(reported.warnings),
        "ignored_events": modules.ignored,
        "unread_event_bytes": modules.unread_bytes,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def peak_memory_bytes(observation: Observation) -> int | None:
    """Peak memory of a worker's largest process; None if unknown."""
    known = [
        each.get("peak_memory_bytes") for each in (*observation.report.live.values(), *observation.samples.values())
    ]
    peaks = [peak for peak in (observation.peak_memory_bytes, *known) if isinstance(peak, int)]
    return max(peaks, default=None)


def binding(observation: Observation, worker: WorkerResult, plan: WorkerPlan) -> dict[str, Any] | None:
    """Where the threads of the worker's main process may run, by its last sample; None if there is none.

    `as_planned`: whether that is inside the planned CPUs; None for a worker that the plan does not bind.
    """
    live = _main_process(observation, worker)
    if live is None:
        return None
    return {**live, "as_planned": _stays_inside(live, plan.all_cpus) if plan.cpus else None}


def _stays_inside(live: Mapping[str, Any], cpus: frozenset[int]) -> bool | None:
    """Whether a process's threads may run on these CPUs only; None without masks of threads.

    None too if the sample has another format than that of system/process_snapshot.py, or too many masks.
    """
    try:
        masks = dict.fromkeys(each["cpus"] for each in live["threads"])
        return all(parse_cpulist(mask) <= cpus for mask in masks) if 0 < len(masks) <= MAX_MASKS else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _main_process(observation: Observation, worker: WorkerResult) -> Mapping[str, Any] | None:
    """The last sample of the process with the plugin, else of the largest process: a shell may have started it."""
    known = {**observation.samples, **observation.report.live}
    if observation.report.main_pid in known:
        return known[observation.report.main_pid]

    def weight(pid: int) -> tuple[int, bool]:
        return _int_or_zero(known[pid].get("peak_memory_bytes")), pid == worker.pid

    return known[max(known, key=weight)] if known else None


def _metrics(plan: LaunchPlan, worker: WorkerResult) -> dict[str, float]:
    """A worker's metrics by name. A value set with cpulaunch.metric() wins over one found in the output."""
    reported = {} if worker.observation is None else dict(worker.observation.report.metrics)
    if plan.launch.metric is None or worker.metric is None or worker.metric.value is None:
        return reported
    return {metric_name(plan.launch.metric): worker.metric.value} | reported


def worker_lines(result: LaunchResult) -> tuple[str, ...]:
    """Lines on the OpenMP runtime and on how the modules of all workers ran; none where nothing was reported."""
    modules = module_lines(worker.observation.report for worker in result.workers if worker.observation is not None)
    return (*_openmp_lines(result), *modules)


def _openmp_lines(result: LaunchResult) -> tuple[str, ...]:
    """A line on the OpenMP runtime of each worker that loaded torch, as far as it is known."""
    files: dict[str, set[int]] = {}
    for worker in result.workers:
        observation = worker.observation
        live = None if observation is None else observation.report.live.get(observation.report.main_pid or 0)
        path = None if live is None else live.get("openmp_path")
        if isinstance(path, str) and len(path) <= MAX_PATH:
            files.setdefault(path, set()).add(worker.index)
    alike = [set(range(len(result.workers)))] == list(files.values())
    texts = [path if alike else f"{path} in {_workers_text(frozenset(found))}" for path, found in files.items()]
    return (f"OpenMP runtime: {escaped(', '.join(texts))}",) if texts else ()


def metric_lines(plan: LaunchPlan, result: LaunchResult) -> tuple[str, ...]:
    """A line for each metric of the run, up to 100, and a warning if --metric found none in some worker's output."""
    metrics = totals(_metrics(plan, worker) for worker in result.workers)
    shown = list(metrics.items())[:MAX_METRIC_LINES]
    lines = [metric_line(name, total, values) for name, (total, values) in shown]
    if len(shown) < len(metrics):
        lines.append(f"and {count_text(len(metrics) - len(shown), 'more metric')} (--report FILE.json has all)")
    return (*map(escaped, lines), *_skipped_lines(result), *_missing_metric(plan, result))


def _skipped_lines(result: LaunchResult) -> tuple[str, ...]:
    """A warning if lines of output took the pattern of --metric too long."""
    skipped = {w.index: w.metric for w in result.workers if w.metric is not None and w.metric.skipped}
    if not skipped or result.exit_code:
        return ()
    number = sum(metric.skipped for metric in skipped.values())
    lines = f"{count_text(number, 'line')} of {_workers_text(frozenset(skipped))}"
    verb = "was" if number == 1 else "were"
    if any(metric.abandoned for metric in skipped.values()):
        lines, verb = f"{lines}, and what followed,", "were"
    return (f"warning: --metric takes too long for the output: {lines} {verb} not searched",)


def _missing_metric(plan: LaunchPlan, result: LaunchResult) -> tuple[str, ...]:
    if plan.launch.metric is None or result.exit_code:
        return ()
    missing = {w.index: w.metric for w in result.workers if w.metric is not None and w.metric.value is None}
    missing = {index: metric for index, metric in missing.items() if not metric.abandoned}
    if not missing:
        return ()
    rejected = next((metric.rejected for metric in missing.values() if metric.rejected), None)
    found = "nothing" if rejected is None else f"{quoted(rejected)}, which is not a number,"
    return (f"warning: --metric matched {found} in the output of {_workers_text(frozenset(missing))}",)


def _workers_text(indexes: frozenset[int]) -> str:
    return f"worker{'s' * (len(indexes) != 1)} {format_cpulist(indexes)}"


def flags_without_effect(plan: LaunchPlan, result: LaunchResult) -> tuple[str, ...]:
    """The flags that only the plugin applies and that some worker had no plugin for; none if a worker failed."""
    if result.exit_code:
        return ()
    indexes = workers_without_plugin(result)
    flags = (flag for worker in plan.workers if worker.index in indexes for flag in _plugin_flags(worker))
    return tuple(dict.fromkeys(flags))


def workers_without_plugin(result: LaunchResult) -> tuple[int, ...]:
    """The indexes of the watched workers in which no process loaded the plugin, as far as their events tell."""
    reports = {w.index: w.observation.report for w in result.workers if w.observation is not None}
    return tuple(index for index, each in reports.items() if each.main_pid is None and not each.lost)


def lost_events(result: LaunchResult) -> tuple[str, ...]:
    """A warning if workers could not write events, on which metrics and what is said of settings rest."""
    lost = frozenset(w.index for w in result.workers if w.observation is not None and w.observation.report.lost)
    if not lost:
        return ()
    return (f"warning: {_workers_text(lost)} could not write all events: is the file system of TMPDIR full?",)


def _plugin_flags(worker: WorkerPlan) -> list[str]:
    text = dict(worker.env).get(VARIABLE)
    if text is None:
        return []
    settings = decode(text)
    backend = ["--dist-backend"] if settings.dist_backend else []
    specs = [setting_specs()[name] for name in PLUGIN_SETTINGS]
    return backend + [
        spec.negative_flag if spec.default is True else spec.flag
        for spec in specs
        if getattr(settings, spec.name, spec.default) != spec.default
    ]
