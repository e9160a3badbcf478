"""One sample: a side's launch as a real one, in a child process, and the figure that it yields."""

from __future__ import annotations

import json
import os
import re
import resource
import sys

from cpulaunch.launch.monitor.worker_report import read_event_file
from cpulaunch.launch.output.metrics import LineReader, Metric, metric_name
from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.launch.process.program import child_environ
from cpulaunch.launch.process.run_directory import (
    check_space,
    events_path,
    in_run_directory,
    make_event_files,
    make_events_directory,
    make_spare_folder,
    remove_run_directory,
)
from cpulaunch.measure.child_process import ChildResult, ChildSetup, run_child
from cpulaunch.measure.disturbance import LaunchUsage, disturbance_between, read_counters
from cpulaunch.measure.last_message import last_message
from cpulaunch.measure.metric_choice import of_all_workers, overload_text
from cpulaunch.measure.samples import WALL_TIME, MetricChoice, Sample, Side
from cpulaunch.records.errors import LEAVE_FOLDERS, LaunchError, NoSpaceError, quoted
from cpulaunch.records.plan import LARGEST_METRIC
from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.reading import read_start
from cpulaunch.system.root import Root
from cpulaunch.system.signals import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.records.host import Budget
    from cpulaunch.records.request import Program

MAX_REPORT_BYTES = 1 << 26
PLAIN_WORKER = 0
MOST_LAUNCHES = 10
"""Of one sample that are paused one after the other: a program may do so to each, without end."""
PATTERN = re.compile(r"[][\\*+?^$|{}]")
"""What names of metrics seldom have, and regular expressions mostly."""
LARGEST_FIGURE = 1e100
"""Of larger figures, and of those below its inverse, neither sums nor ratios need be numbers that a float holds."""
NAMED_SIGNALS = {SIGKILL: "SIGKILL", 6: "SIGABRT", 11: "SIGSEGV", 15: "SIGTERM", 7: "SIGBUS", 4: "SIGILL", 8: "SIGFPE"}


@record
class LaunchSetup:
    """What all samples of a measurement share.

    `python`: the Python that runs the program. `plain`: the command that runs it without cpulaunch. `folder`: a private
    one, for reports. `reports`: whether cpulaunch's launches write a report, which lets a program report metrics and
    keeps a supervisor beside it. `budget`: the CPUs on which other processes disturb a launch; None: all.
    """

    child: ChildSetup
    folder: str
    python: str = sys.executable
    plain: tuple[str, ...] = ()
    reports: bool = True
    budget: Budget | None = None


@record
class _Outcome:
    """What is known of a launch that has ended. `rejected`: what the pattern found that is no number, if known."""

    child: ChildResult
    metrics: Mapping[str, float]
    checksums: Mapping[str, Any]
    report: Mapping[str, Any] | None
    rejected: str | None = None


def take_sample(
    side: Side, program: tuple[str, ...], *, choice: MetricChoice, limit_seconds: float, setup: LaunchSetup
) -> Sample:
    """The sample of one launch of the program: its script and arguments, or -m MODULE, or --no-python COMMAND.

    Effect: launches it, and waits until everything that it started has ended; launches it again if it was paused, as
    its figure may include the pause. Raises: KeyboardInterrupt; LaunchError if there can be no folder for its figures.
    """
    for _ in range(MOST_LAUNCHES):
        sample, paused = _sample_of_launch(side, program, choice, limit_seconds, setup)
        if not paused:
            return sample
    return replace(sample, value=None, failure=f"each of its {MOST_LAUNCHES} launches was paused (Ctrl-Z, SIGTSTP)")


def _sample_of_launch(
    side: Side, program: tuple[str, ...], choice: MetricChoice, limit_seconds: float, setup: LaunchSetup
) -> tuple[Sample, bool]:
    """The sample of one launch, and whether Ctrl-Z paused it. Effect: see `take_sample`."""
    root = Root()
    folder = _own_folder(setup.folder, setup.child.environ)
    cpus = None if setup.budget is None else setup.budget.cpus
    before, used = read_counters(root, cpus), _used()
    try:
        if side.plain:
            outcome = _launch_plain(choice, limit_seconds, setup=setup, folder=folder)
        else:
            outcome = _launch_cpulaunch(side, program, choice, limit_seconds, setup=setup, folder=folder)
    finally:
        remove_run_directory(folder)
    now = _used()
    usage = LaunchUsage(
        cpu_seconds=now.cpu_seconds - used.cpu_seconds,
        involuntary_switches=now.involuntary_switches - used.involuntary_switches,
    )
    seconds = outcome.child.seconds
    after = read_counters(root, cpus)
    disturbance = disturbance_between(before, after, usage, seconds=seconds, budget=setup.budget)
    failure = _failure(outcome.child, limit_seconds=limit_seconds, oom_kills=disturbance.oom_kills)
    value = None
    if failure is None:
        value, failure = _value(outcome, choice)
    sample = Sample(
        value=value,
        seconds=seconds,
        metrics=outcome.metrics,
        checksums=outcome.checksums,
        failure=failure,
        exit_code=outcome.child.exit_code,
        disturbance=disturbance,
        report=outcome.report,
    )
    return sample, outcome.child.paused


def _own_folder(parent: str, environ: Mapping[str, str]) -> str:
    """A new folder for one launch, with the file for a plain one's metrics; elsewhere if that for all has no space.

    Raises: LaunchError, as a program may have removed that.
    """
    try:
        check_space(parent)
        return make_events_directory(parent, [PLAIN_WORKER])
    except NoSpaceError:
        return _spare_folder(environ)
    except LaunchError as error:
        what = "cannot make a folder for the figures of a launch"
        raise LaunchError(what, value=parent, source=error.source, hint=LEAVE_FOLDERS) from None


def _spare_folder(environ: Mapping[str, str]) -> str:
    """A new folder elsewhere, with the file for metrics. Raises: LaunchError."""
    folder = make_spare_folder(environ)
    try:
        make_event_files(folder, [PLAIN_WORKER])
    except LaunchError:
        remove_run_directory(folder)
        raise
    return folder


def plain_command(program: Program) -> tuple[str, ...]:
    """The command that runs the program without cpulaunch."""
    if program.kind == "command":
        return (program.target, *program.args)
    module = ("-m",) if program.kind == "module" else ()
    return (program.interpreter, *module, program.target, *program.args)


def _used() -> LaunchUsage:
    """What all children of this process that have been reaped used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return LaunchUsage(cpu_seconds=usage.ru_utime + usage.ru_stime, involuntary_switches=usage.ru_nivcsw)


def _launch_plain(choice: MetricChoice, limit: float, *, setup: LaunchSetup, folder: str) -> _Outcome:
    """The end of a launch by Python alone, whose metrics come through the file that a launch names for them.

    The plugin stays inactive: the variable with its settings is not set.
    """
    events = events_path(folder, PLAIN_WORKER)
    environ = child_environ(setup.child.environ, (*NOT_INHERITED, (EVENTS_VARIABLE, events)))
    metric = None if choice.pattern is None else Metric(choice.pattern)
    readers = [] if metric is None else [LineReader(metric), LineReader(metric)]
    child = run_child(
        setup.plain,
        replace(setup.child, environ=environ),
        limit_seconds=limit,
        receive=[reader.feed for reader in readers],
    )
    for reader in readers:
        reader.finish()
    told = read_event_file(events)
    found = {} if metric is None or metric.value is None else {metric_name(choice.pattern or ""): metric.value}
    return _Outcome(
        child=child,
        metrics={**told.metrics, **found},
        checksums=told.checksums,
        report=None,
        rejected=None if metric is None else metric.rejected,
    )


def _launch_cpulaunch(
    side: Side, program: tuple[str, ...], choice: MetricChoice, limit: float, *, setup: LaunchSetup, folder: str
) -> _Outcome:
    """The end of a launch by cpulaunch with the side's options, and what its report says."""
    path = os.path.join(folder, "report.json")
    options = [*side.options]
    if not any(option.partition("=")[0] == "--python" for option in options):
        options += ["--python", setup.python]
    if setup.reports:
        options += ["--report", path]
    if choice.pattern is not None:
        options += ["--metric", choice.pattern]
    command = (sys.executable, "-P", "-m", "cpulaunch", "run", *options, *program)
    child = run_child(command, setup.child, limit_seconds=limit, guarded=True)
    # After a failure, what is there may be the program's: it may have ended the launch, or kept it from writing.
    report = _read_report(path) if setup.reports and child.exit_code == 0 else None
    metrics = {} if report is None else _of_all_workers(report["metrics"], choice)
    return _Outcome(child=child, metrics=metrics, checksums=_first_checksums(report), report=report)


def _read_report(path: str) -> dict[str, Any] | None:
    """The report of a launch; None if it wrote none, or the program one that is none, or another folder for it."""
    name, folder = in_run_directory(path)
    try:
        if not os.path.samestat(os.stat(path), os.stat(name, dir_fd=folder)):
            return None
        report = json.loads(read_start(name, max_bytes=MAX_REPORT_BYTES, folder=folder))
    except (OSError, ValueError, RecursionError):
        return None
    return report if _is_report(report) else None


def _is_report(report: Any) -> bool:
    """Whether what a measurement uses of the report has its form."""
    if not isinstance(report, dict):
        return False
    plan, metrics, workers = (report.get(name) for name in ("plan", "metrics", "workers"))
    return (
        isinstance(plan, dict)
        and "mode" in plan
        and isinstance(metrics, dict)
        and all(isinstance(each, dict) and _are_figures(each.get("values")) for each in metrics.values())
        and isinstance(workers, list)
        and all(isinstance(each, dict) and isinstance(each.get("checksums"), dict) for each in workers)
    )


def _are_figures(values: Any) -> bool:
    """Whether these are the figures of workers, each None where one has none, of which one has."""
    figures = [value for value in values if value is not None] if isinstance(values, list) else []
    return bool(figures) and all(isinstance(each, int | float) and abs(each) <= LARGEST_METRIC for each in figures)


def _first_checksums(report: Mapping[str, Any] | None) -> dict[str, Any]:
    """The checksums that the first worker of a report gave; those of the others are in the report."""
    workers = [] if report is None else report["workers"]
    return dict(workers[0]["checksums"]) if workers else {}


def _of_all_workers(metrics: Mapping[str, Any], choice: MetricChoice) -> dict[str, float]:
    """The metrics of a report, each of all workers that have it."""
    chosen = choice.name if choice.pattern is None else metric_name(choice.pattern)
    return {
        name: of_all_workers(
            name,
            [float(value) for value in each["values"] if value is not None],
            lower=choice.lower_is_better if name == chosen else None,
        )
        for name, each in metrics.items()
    }


def _value(outcome: _Outcome, choice: MetricChoice) -> tuple[float | None, str | None]:
    """The figure of a launch that succeeded, or None and why there is none."""
    if choice.name is None and choice.pattern is None:
        return outcome.child.seconds, None
    name = choice.name if choice.pattern is None else metric_name(choice.pattern)
    value = outcome.metrics.get(name or WALL_TIME)
    if value is None and outcome.rejected is not None:
        return None, f"it printed {quoted(outcome.rejected)} for {name!r}, which is not a number"
    if value is None:
        return None, f"it {_missing(choice, name or '')}"
    if (missing := _instances_without(outcome.report, name or "")) is not None:
        return None, f"{missing} {_without(choice)} {name!r}"
    failure = None if name is None else overload_text(name, outcome.metrics)
    if value <= 0:
        failure = f"its {name!r} is {value:g}, and only positive figures have ratios"
    elif not 1 / LARGEST_FIGURE <= value <= LARGEST_FIGURE:
        failure = f"its {name!r} is {value:g}, which is beyond all measure"
    return (value, None) if failure is None else (None, failure)


def _without(choice: MetricChoice) -> str:
    return "reported no metric" if choice.pattern is None else "printed no number that --metric matches for"


def _missing(choice: MetricChoice, name: str) -> str:
    """What a program without the figure did. Of a name that looks like a pattern: what would make it one."""
    is_pattern = choice.pattern is None and PATTERN.search(name) is not None
    hint = "; as a pattern for the output it lacks parentheses around the number" if is_pattern else ""
    return f"{_without(choice)} {name!r}{hint}"


def _instances_without(report: Mapping[str, Any] | None, name: str) -> str | None:
    """Which instances of a launch have no metric of this name, in words; None if all do.

    Of the ranks of a job one may report for all.
    """
    if report is None or report["plan"]["mode"] != "instances":
        return None
    values = report["metrics"].get(name, {}).get("values", ())
    missing = sum(value is None for value in values)
    return f"{missing} of {len(values)} instances" if missing else None


def _failure(child: ChildResult, *, limit_seconds: float, oom_kills: int) -> str | None:
    """How a launch failed, with the last line of its messages; None if it did not."""
    code = child.exit_code
    if code is None:
        return f"it was still running after {limit_seconds:.3g} s"
    if code == 0:
        return None
    number = -code if code < 0 else code - 128
    if oom_kills and number == SIGKILL:
        return "the kernel ended it for want of memory"
    name = NAMED_SIGNALS.get(number)
    after = f" ({name})" if code > 0 and name is not None else ""
    how = f"{name or f'signal {number}'} ended it" if code < 0 else f"it exited with code {code}{after}"
    last = last_message(child.stderr_tail)
    memory = " after the kernel had ended a process for want of memory" if oom_kills else ""
    return f"{how}{memory}: {last}" if last else f"{how}{memory}"
