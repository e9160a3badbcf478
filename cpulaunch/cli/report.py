"""A run's report: whether it can be written is asked before anything starts, and it is written whole or not at all."""

from __future__ import annotations

import json
import os
import stat

from cpulaunch.cli import terminal
from cpulaunch.launch.supervision.report import metric_lines, report, unapplied, without_plugin
from cpulaunch.launch.supervision.result import LaunchResult
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.view import plan_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STANDARD_OUTPUT = "-"


def check_report(path: str) -> None:
    """Effect: none. Raises: CpulaunchError if no report can be written there."""
    if path == STANDARD_OUTPUT:
        return
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise _unwritable(path, "it is a directory")
    if not os.path.isdir(folder):
        raise _unwritable(path, f"there is no directory {folder}")
    if not os.access(folder if _is_replaced(path) else path, os.W_OK):
        raise _unwritable(path, f"no permission to write in {folder}")


def tell_the_rest(plan: LaunchPlan, result: LaunchResult, *, version: str) -> int:
    """The launch's exit code. Effect: the report is written, figures and trouble are told on stderr."""
    for line in metric_lines(plan, result):
        terminal.complain(f"cpulaunch: {line}")
    code = result.exit_code
    if missing := unapplied(plan, result):
        code = _complain_of_absence(missing, _who_lacks(result), strict=plan.launch.strict)
    if plan.launch.report is None:
        return code
    content = report(plan, result, version=version, plan_json=plan_view.plan_json(plan))
    return _write_or_complain(plan.launch.report, content | {"exit_code": code})


def _who_lacks(result: LaunchResult) -> str:
    lacking = without_plugin(result)
    if len(lacking) == len(result.workers):
        return "no worker"
    return f"worker {format_cpulist(frozenset(lacking))} of {len(result.workers)} never"


def _complain_of_absence(without_effect: tuple[str, ...], who: str, *, strict: bool) -> int:
    """The exit code of a run that succeeded, but without what these flags ask for from some workers."""
    flags = ", ".join(without_effect)
    reason = f"{who} loaded torch 2.5 or newer with cpulaunch in its environment"
    if not strict:
        terminal.complain(f"cpulaunch: warning: without effect: {flags}: {reason}")
        return 0
    error = CpulaunchError(
        f"without effect: {flags}", value=reason, source="--strict", hint="pip install cpulaunch there"
    )
    terminal.complain(str(error))
    return error.exit_code


def _write_or_complain(path: str, content: dict[str, Any]) -> int:
    """The exit code: the content's, unless the run succeeded and its report could not be written."""
    code = int(content["exit_code"])
    try:
        write_report(path, content)
    except CpulaunchError as error:
        terminal.complain(str(error))
        return code or error.exit_code
    if path != STANDARD_OUTPUT:
        terminal.complain(f"cpulaunch: report: {path}")
    return code


def write_report(path: str, content: dict[str, Any]) -> None:
    """Effect: the file holds the report, whole; what is no regular file (a pipe, /dev/stdout) is written as it is.

    Raises: CpulaunchError.
    """
    if path == STANDARD_OUTPUT:
        terminal.print_json(content)
        return
    text = json.dumps(content, indent=2) + "\n"
    target = os.path.realpath(path) if _is_replaced(path) else path
    temporary = f"{target}.{os.getpid()}.new" if _is_replaced(path) else path
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        if temporary != target:
            os.replace(temporary, target)
    except OSError as error:
        if temporary != target and os.path.exists(temporary):
            os.unlink(temporary)
        raise _unwritable(path, error.strerror or str(error)) from None


def _is_replaced(path: str) -> bool:
    """Whether a report there is a file of its own."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _unwritable(path: str, reason: str) -> CpulaunchError:
    hint = "--report needs a FILE.json in a directory that can be written, or - for stdout"
    return CpulaunchError("the report cannot be written", value=path, source=reason, hint=hint)
