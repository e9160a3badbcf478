"""The command compare: check the sides, run the rounds, say which side is better."""

from __future__ import annotations

import os
import sys
import time

import cpulaunch
from cpulaunch.charts.compare_charts import compare_charts
from cpulaunch.cli.help.commands import command_named
from cpulaunch.cli.measuring.compare_arguments import BEGINS_PROGRAM, CompareLine, parse_compare, side_labels
from cpulaunch.cli.measuring.outputs import PageFacts, check_outputs, page_facts, write_outputs
from cpulaunch.cli.measuring.progress import ProgressLine
from cpulaunch.measure.comparison import Comparer, ComparisonResult
from cpulaunch.measure.comparison_json import comparison_json
from cpulaunch.measure.comparison_text import budget_warning, comparison_text, progress_text
from cpulaunch.measure.execution import plain_command, take_sample
from cpulaunch.measure.measuring_process import measuring_process
from cpulaunch.measure.samples import MetricChoice, Sample, Side
from cpulaunch.measure.statistics import fewest_rounds
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import replace
from cpulaunch.view.hidden_values import hidden_names
from cpulaunch.view.text import painter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.measure.execution import LaunchSetup
    from cpulaunch.records.command_line import CommandLine

    Json = Mapping[str, Any]

COMMAND = command_named("compare")
NOT_COMPARED = frozenset({"--json", "--brief", "--dry-run", "--help", "--version"})
"""Options of a side with which nothing would be launched."""
OWN_SETTINGS = {
    "report": "compare writes reports of its own",
    "metric": "give it to compare: --metric REGEX",
    "html": "give it to compare: --html FILE",
}
"""Settings that a side cannot have, and why."""
FAILED, INTERRUPTED = 1, 130


def compare(arguments: Sequence[str], services: Services) -> int:
    """The exit code of `compare`. Effect: launches the sides. Raises: CpulaunchError, before anything is launched."""
    line = parse_compare(arguments)
    if line.help:
        return services.print_help(COMMAND)
    line = replace(line, files=check_outputs(line.files))
    lines = [services.parse([*(words or ()), *line.program]) for words in line.sides]
    for words, parsed in zip(line.sides, lines, strict=True):
        _check_side(words, parsed, line.program)
    lines = [services.resolve(parsed) for parsed in lines]
    hosts = [services.host_and_plan(parsed)[0] for parsed in lines]
    chosen = [parsed.python.path for parsed in lines if parsed.python is not None and "python" not in parsed.values]
    labels = side_labels(line.sides, [hidden_names(parsed) for parsed in lines])
    sides = [
        Side(label=label, options=words or (), plain=words is None)
        for label, words in zip(labels, line.sides, strict=True)
    ]
    if line.limits.rounds < fewest_rounds(len(sides)):
        services.notify(f"warning: a verdict needs {fewest_rounds(len(sides))} rounds; --rounds allows fewer")
    labelled = [(side.label, None if side.plain else parsed) for side, parsed in zip(sides, lines, strict=True)]
    facts = None if line.files.html is None else page_facts(services, labelled)
    plain, budget = _plain_command(line, lines), hosts[0].limits.budget
    with measuring_process(services.notify, services.environ) as setup:
        setup = replace(setup, python=(*chosen, sys.executable)[0], plain=plain, budget=budget)
        comparison = _measured(sides, line, services, setup)
    data = comparison_json(
        comparison, line.limits, program=line.program, version=cpulaunch.__version__, host=os.uname().nodename
    )
    _print(comparison, data, line, services)
    failure = write_outputs(
        line.files,
        services,
        page=lambda: _page(data, facts),
        charts=lambda: compare_charts(data),
        title=f"cpulaunch compare: {' '.join(line.program)}",
    )
    return _exit_code(comparison, line) or failure


def _page(data: Json, facts: PageFacts | None) -> str:
    from cpulaunch.html.compare_page import compare_page

    if facts is None:
        return ""
    sides = [replace(side, workers=found["workers"]) for side, found in zip(facts.sides, data["sides"], strict=True)]
    return compare_page(data, machine=facts.machine, sides=sides)


def _check_side(words: tuple[str, ...] | None, parsed: CommandLine, program: tuple[str, ...]) -> None:
    """Raises: UsageError if the side launches nothing, or has another program than the one behind `--`."""
    found = parsed.switches & NOT_COMPARED
    if found or parsed.emit is not None or parsed.sysroot is not None:
        named = min(found) if found else "--emit" if parsed.emit is not None else "--sysroot"
        raise UsageError(f"a side with {named} starts nothing", hint=f"leave {named} out")
    for name, reason in OWN_SETTINGS.items():
        if name in parsed.values and words is not None:
            raise UsageError(f"a side takes no --{name}", hint=reason)
    target = next((word for word in program if word not in BEGINS_PROGRAM), None)
    if parsed.program is None or parsed.program.target != target:
        seen = None if parsed.program is None else parsed.program.target
        raise UsageError("a side names a program of its own", value=seen, hint="the program goes behind --")


def _plain_command(line: CompareLine, lines: Sequence[CommandLine]) -> tuple[str, ...]:
    """The command of the side that is Python alone; empty if there is none."""
    plain = [parsed.program for words, parsed in zip(line.sides, lines, strict=True) if words is None]
    return next((plain_command(program) for program in plain if program is not None), ())


def _measured(sides: Sequence[Side], line: CompareLine, services: Services, setup: LaunchSetup) -> ComparisonResult:
    """The finished comparison. Effect: launches the sides."""
    progress = ProgressLine(services.environ, width=services.width)

    def take(side: Side, choice: MetricChoice | None, limit_seconds: float) -> Sample:
        figure = choice or MetricChoice()
        reports = choice is None or choice.name is not None or choice.pattern is not None
        return take_sample(
            side, line.program, choice=figure, limit_seconds=limit_seconds, setup=replace(setup, reports=reports)
        )

    warned: list[str] = []

    def show(now: ComparisonResult) -> None:
        warning = budget_warning(now, line.limits)
        if warning and not warned:
            warned.append(warning)
            progress.clear()
            services.notify(warning)
        progress.show(progress_text(now, line.limits))

    comparer = Comparer(
        sides,
        line.limits,
        take=take,
        clock=lambda: time.monotonic() - setup.child.pauses.seconds,
        progress=show,
        seed=int.from_bytes(os.urandom(4)),
    )
    try:
        return comparer.run(line.choice, lower=line.lower_is_better)
    finally:
        progress.clear()


def _print(comparison: ComparisonResult, data: Json, line: CompareLine, services: Services) -> None:
    if line.json:
        services.print_json(data)
    else:
        strong = painter("bold", color=services.color)
        services.print_text(comparison_text(comparison, line.limits, width=services.width, strong=strong))


def _exit_code(comparison: ComparisonResult, line: CompareLine) -> int:
    if comparison.ended == "interrupted":
        return INTERRUPTED
    slower = line.fail_if_slower and any(each.verdict == "worse" for each in comparison.estimates)
    failed = comparison.ended == "failed" or (comparison.failures and not comparison.rounds)
    return FAILED if failed or slower else 0
