"""Measures a machine, one child process after the other, and remembers the figures."""

from __future__ import annotations

import json
import math
import os
import resource
from datetime import UTC, datetime
from functools import partial
from time import monotonic

from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.launch.process.program import child_environ
from cpulaunch.measure.calibration.runs import calibration_runs
from cpulaunch.measure.child_process import ChildSetup, run_child
from cpulaunch.measure.disturbance import LaunchUsage, disturbance_between, disturbance_reasons, read_counters
from cpulaunch.measure.last_message import last_message
from cpulaunch.records.host import UNITS, Calibration, CalibrationFigure
from cpulaunch.records.record import record
from cpulaunch.system.files.paths import without_relative_folders
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cpulaunch.measure.calibration.runs import CalibrationRun
    from cpulaunch.records.host import Budget, Host

MODULE = "cpulaunch.worker.calibration.main"
TRIES = 3
"""A process that others disturb is repeated until it has been started so often."""
LIMIT_SECONDS = 60.0
"""For one process: it imports torch and measures for two seconds; a slow machine and a slow disk take longer."""


def calibration_of(
    host: Host, *, python: str, environ: Mapping[str, str], more: Sequence[Callable[[], RunResult]] = ()
) -> Calibration:
    """What the machine does with this Python's torch. Effect: measures it for seconds.

    `more`: measure what a process of this module does not, such as collectives.
    """
    take = partial(measured_run, budget=host.limits.budget, python=python, environ=environ)
    runs = calibration_runs(host, _dispatch(host))
    results = [*(undisturbed(partial(take, run)) for run in runs), *map(undisturbed, more)]
    reasons = dict.fromkeys(reason for each in results for reason in each.reasons)
    return Calibration(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        figures=tuple(figure for each in results for figure in each.figures),
        failures=(
            *(failure for each in results for failure in each.failures),
            *(f"no choice follows these figures: {reason}" for reason in reasons),
        ),
        disturbed=bool(reasons),
    )


@record
class RunResult:
    """What a process measured, what it could not measure, and what disturbed it."""

    figures: tuple[CalibrationFigure, ...]
    failures: tuple[str, ...]
    reasons: tuple[str, ...] = ()


def undisturbed(take: Callable[[], RunResult]) -> RunResult:
    """The first result that nothing disturbed, else the last one. Effect: `take` starts a process."""
    result = take()
    for _ in range(TRIES - 1):
        if not result.reasons:
            break
        result = take()
    return result


class DisturbanceWatch:
    """What others do on the CPUs of a budget while this process waits for others that it has started."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._root = Root()
        self._before = read_counters(self._root, budget.cpus)
        self._used, self._start = _used(), monotonic()

    def reasons(self) -> tuple[str, ...]:
        """What disturbed the measurement so far, in words. The processes that were started have been waited for."""
        seconds = monotonic() - self._start
        usage = LaunchUsage(cpu_seconds=_used() - self._used)
        after = read_counters(self._root, self._budget.cpus)
        disturbance = disturbance_between(self._before, after, usage, seconds=seconds, budget=self._budget)
        return disturbance_reasons(disturbance, seconds=seconds)


def measured_run(run: CalibrationRun, *, budget: Budget, python: str, environ: Mapping[str, str]) -> RunResult:
    """The result of one process, and what others did on these CPUs meanwhile. Effect: starts it; it has ended."""
    watch = DisturbanceWatch(budget)
    figures, failures = measure(run, python=python, environ=environ)
    return RunResult(figures=figures, failures=failures, reasons=watch.reasons())


def _used() -> float:
    """CPU time in seconds of this process and of all its children that have been reaped."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _dispatch(host: Host) -> str | None:
    """The MKL dispatch library, if this torch would use it."""
    if host.torch is None or not host.torch.mkl_dispatch_symbol:
        return None
    return next((each.path for each in host.libraries if each.kind == "mkl-dispatch" and not each.untrusted), None)


def measure(
    run: CalibrationRun, *, python: str, environ: Mapping[str, str]
) -> tuple[tuple[CalibrationFigure, ...], tuple[str, ...]]:
    """The figures of a run, and what could not be measured. Effect: starts it; it has ended."""
    setup = ChildSetup(environ=without_relative_folders(child_environ(environ, (*NOT_INHERITED, *run.variables))))
    child = run_child((python, "-P", "-m", MODULE, *run.words), setup, limit_seconds=LIMIT_SECONDS)
    figures, failures = parse(child.stdout_tail.decode("utf-8", "replace"))
    if child.exit_code != 0:
        names = ", ".join(os.path.basename(path) for path in run.preloads)
        subjects = ", ".join(subject for _, subject in run.parts)
        failures = (f"{subjects}{f' ({names})' if names else ''}: {_end(child.exit_code, child.stderr_tail)}",)
    return figures, failures


def _end(code: int | None, stderr: bytes) -> str:
    if code is None:
        return f"no answer within {LIMIT_SECONDS:g} s"
    return last_message(stderr) or f"ended with exit code {code}"


def parse(output: str) -> tuple[tuple[CalibrationFigure, ...], tuple[str, ...]]:
    """The figures and failures in the last line of a run's output; none if it is something else."""
    try:
        answer = json.loads(output.strip().rpartition("\n")[2])
        figures = tuple(
            CalibrationFigure(str(kind), str(name), float(value)) for kind, name, value in answer["figures"]
        )
        failures = tuple(map(str, answer["failures"]))
    except (ValueError, KeyError, TypeError):
        return (), ("the measurement printed something else than its result",)
    return tuple(each for each in figures if each.kind in UNITS and 0 < each.value < math.inf), failures
