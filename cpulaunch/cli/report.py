"""The end of a watched launch: metrics, settings without effect, and the report file."""

from __future__ import annotations

import json
import os
import stat

import cpulaunch
from cpulaunch.cli import terminal
from cpulaunch.launch.supervision.report import (
    flags_without_effect,
    metric_lines,
    report,
    worker_lines,
    workers_without_plugin,
)
from cpulaunch.launch.supervision.result import LaunchResult
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.system.files.paths import locate
from cpulaunch.system.files.writing import write_output
from cpulaunch.view import plan_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def check_report(path: str) -> None:
    """Raises: CpulaunchError if no report can be written to this path."""
    if path == "-":
        return
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise _unwritable(path, "it is a directory")
    if not os.path.isdir(folder):
        raise _unwritable(path, f"there is no directory {folder}")
    if not os.access(folder if _is_replaced(path) else path, os.W_OK):
        raise _unwritable(path, f"no permission to write in {folder}")
    try:
        os.close(locate(path).folder)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None


def finish_watched_launch(plan: LaunchPlan, result: LaunchResult, *, notify: Callable[[str], None]) -> int:
    """The launch's exit code. Effect: writes the report, and metrics and problems through `notify`."""
    for line in metric_lines(plan, result):
        notify(line)
    code = result.exit_code
    if flags := flags_without_effect(plan, result):
        code = _report_unapplied(flags, _workers_without_plugin(result), strict=plan.launch.strict, notify=notify)
    if plan.launch.report is None:
        return code
    content = report(plan, result, version=cpulaunch.__version__, plan_json=plan_view.plan_json(plan))
    try:
        write_report(plan.launch.report, content | {"exit_code": code})
    except CpulaunchError as error:
        notify(f"error: {error}")
        return code or error.exit_code
    if plan.launch.quiet:
        return code
    for line in worker_lines(result):
        notify(line)
    if not plan.launch.reports_on_stdout:
        notify(f"report: {plan.launch.report}")
    return code


def _workers_without_plugin(result: LaunchResult) -> str:
    """The workers that did not load the plugin, as the subject of a sentence with "loaded"."""
    workers = workers_without_plugin(result)
    if len(workers) == len(result.workers):
        return "no worker"
    return f"worker {format_cpulist(frozenset(workers))} of {len(result.workers)} never"


def _report_unapplied(flags: tuple[str, ...], workers: str, *, strict: bool, notify: Callable[[str], None]) -> int:
    """The exit code of a successful run in which some workers did not apply these flags."""
    error = CpulaunchError(
        f"without effect: {', '.join(flags)}",
        value=f"{workers} loaded torch 2.5 or newer with cpulaunch in its environment",
        source="--strict" if strict else None,
        hint="pip install cpulaunch there" if strict else None,
    )
    notify(f"{'error' if strict else 'warning'}: {error}")
    return error.exit_code if strict else 0


def write_report(path: str, content: dict[str, Any]) -> None:
    """Effect: a regular file is replaced atomically; anything else (a pipe, /dev/stdout) is written directly.

    Only this user can read a new file.

    Raises: CpulaunchError.
    """
    if path == "-":
        terminal.print_json(content)
        return
    text = json.dumps(content, indent=2) + "\n"
    try:
        write_output(path, text.encode())
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None


def _is_replaced(path: str) -> bool:
    """Whether a report at this path is a regular file, existing or new."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _unwritable(path: str, reason: str) -> CpulaunchError:
    hint = "--report needs a FILE.json in a writable directory, or - for stdout"
    return CpulaunchError("the report cannot be written", value=path, source=reason, hint=hint)
