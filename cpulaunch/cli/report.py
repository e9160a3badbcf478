"""The end of a watched launch: metrics, settings without effect, and the report file."""

from __future__ import annotations

import resource  # noqa: F401  # For os.wait4: at the end of a launch, the standard library may have been removed.

import cpulaunch
from cpulaunch.cli import terminal
from cpulaunch.launch.supervision.findings import findings
from cpulaunch.launch.supervision.report import (
    flags_without_effect,
    lost_events,
    metric_lines,
    report,
    worker_lines,
    workers_without_plugin,
)
from cpulaunch.launch.supervision.result import LaunchResult
from cpulaunch.probe import Root
from cpulaunch.probe.cgroups import throttling
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import record
from cpulaunch.system.files.outputs import PAGE, REPORT, Output, check_path, save_output
from cpulaunch.view import plan_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from cpulaunch.records.host import Host, Throttling
    from cpulaunch.system.files.special import FileId


@record
class ReportsBefore:
    """What is known before a launch: periods of CPU quotas, and the pipes or devices at the paths of outputs."""

    throttling: Throttling
    direct: Mapping[Output, FileId | None]


def check_reports(plan: LaunchPlan) -> ReportsBefore:
    """What its reports need to know. Raises: CpulaunchError if the report or the page cannot be written."""
    paths = {REPORT: None if plan.launch.report == "-" else plan.launch.report, PAGE: plan.launch.html}
    direct = {output: check_path(output, path) for output, path in paths.items() if path is not None}
    return ReportsBefore(throttling=throttling(Root()), direct=direct)


def finish_watched_launch(
    plan: LaunchPlan,
    host: Host,
    result: LaunchResult,
    before: ReportsBefore | None,
    environ: Mapping[str, str],
    *,
    notify: Callable[[str], bool],
) -> int:
    """The launch's exit code. Effect: writes the report and the page, and metrics and problems through `notify`.

    `before`: what `check_reports` found; None if it has no report. `environ`: of the launch.
    """
    notify = _on_new_line(notify) if result.inside_line else notify
    for line in (*metric_lines(plan, result), *lost_events(result)):
        notify(line)
    code = result.exit_code
    if flags := flags_without_effect(plan, result):
        code = _report_unapplied(flags, _workers_without_plugin(result), strict=plan.launch.strict, notify=notify)
    if before is None:
        return code
    periods = throttling(Root()).since(before.throttling)
    found = findings(plan, result, periods, preload=environ.get("LD_PRELOAD", ""))
    plan_json = plan_view.plan_json(plan)
    content = report(plan, result, version=cpulaunch.__version__, plan_json=plan_json, found=found)
    outputs = _write_outputs(plan, host, content | {"exit_code": code}, direct=before.direct)
    failures = [error for error in outputs if error is not None]
    for error in failures:
        notify(f"error: {error}")
    if failures:
        return code or failures[0].exit_code
    if plan.launch.quiet:
        return code
    for line in (*worker_lines(result), *(each.line for each in found)):
        notify(line)
    for output, path in ((REPORT, plan.launch.report), (PAGE, plan.launch.html)):
        if output in before.direct:
            notify(f"{output.name}: {path}")
    return code


def _on_new_line(notify: Callable[[str], bool]) -> Callable[[str], bool]:
    """The same function, which ends the last line of the workers before the first message that is written."""
    lead = "\n"

    def notify_on_new_line(text: str) -> bool:
        nonlocal lead
        written = notify(lead + text)
        lead = "" if written else lead
        return written

    return notify_on_new_line


def _write_outputs(
    plan: LaunchPlan, host: Host, content: dict[str, Any], *, direct: Mapping[Output, FileId | None]
) -> Iterator[CpulaunchError | None]:
    """The error of each output that cannot be written, or None. Effect: writes the report and the page."""
    if plan.launch.report == "-":
        terminal.print_json(content)
    elif plan.launch.report is not None:
        text = terminal.json_text(content) + "\n"
        yield save_output(REPORT, plan.launch.report, text, direct=direct[REPORT])
    if plan.launch.html is not None:
        from cpulaunch.html.run_page import run_page
        from cpulaunch.view.machine_svg import machine_drawing

        owners = plan_view.core_owners(plan)
        core_map = machine_drawing(host, owners) if owners else None
        machine = host.cpu.model_name or host.arch
        page = run_page(content, machine=machine, core_map=core_map, calibration=host.calibration)
        yield save_output(PAGE, plan.launch.html, page, direct=direct[PAGE])


def _workers_without_plugin(result: LaunchResult) -> str:
    """The workers that did not load the plugin, as the subject of a sentence with "loaded"."""
    workers = workers_without_plugin(result)
    if len(workers) == len(result.workers):
        return "no worker"
    return f"worker {format_cpulist(frozenset(workers))} of {len(result.workers)} never"


def _report_unapplied(flags: tuple[str, ...], workers: str, *, strict: bool, notify: Callable[[str], object]) -> int:
    """The exit code of a successful run in which some workers did not apply these flags."""
    error = CpulaunchError(
        f"without effect: {', '.join(flags)}",
        value=f"{workers} loaded torch 2.5 or newer with cpulaunch in its environment",
        source="--strict" if strict else None,
        hint="pip install cpulaunch there" if strict else None,
    )
    notify(f"{'error' if strict else 'warning'}: {error}")
    return error.exit_code if strict else 0
