"""A search's result in words. Pure."""

from __future__ import annotations

import shlex
from collections import Counter

from cpulaunch.measure.comparison_text import metric_label
from cpulaunch.measure.tuning.outcome.result import shown_options, state, verdict
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import count_text
from cpulaunch.view.text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpulaunch.measure.tuning.finalists import Finalist
    from cpulaunch.measure.tuning.outcome.result import TuneResult

MOST_FAILURES_SHOWN = 5
LEAST_IMPORTANCE = 0.01
UNCOMPARED = (
    "outputs were not compared: the program calls no cpulaunch.checksum(), and --output is not given; so no setting "
    "that changes numerics was tried"
)


def result_text(result: TuneResult, *, width: int, strong: Callable[[str], str]) -> str:
    """The result for a person. `strong`: writes the verdict so that it is seen first."""
    lines = [strong(line) for line in wrapped(escaped(verdict(result)), width)]
    for block in (_finalist_lines(result), _facts_found(result), _usage_lines(result)):
        found = [line for text in block for line in (wrapped(text, width) if not text.startswith(" ") else [text])]
        lines += ["", *found] if found else []
    return "\n".join(lines)


def _finalist_lines(result: TuneResult) -> Iterator[str]:
    if result.found.final.finalists:
        yield "final round, times as good as the default [between]:"
    for finalist in result.found.final.finalists:
        yield escaped(f"  {_finalist_text(finalist)}")


def _finalist_text(finalist: Finalist) -> str:
    shown = shown_options(finalist.configuration)
    if finalist.failure is not None:
        return f"failed  {shown}: {finalist.failure}"
    estimate = finalist.estimate
    if estimate is None:
        return f"{shown}: not measured again"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.ratio:.3f}  {shown}: too few rounds for a verdict"
    return f"{estimate.ratio:.3f}  [{estimate.low:.3f}, {estimate.high:.3f}]  {shown}"


def _facts_found(result: TuneResult) -> Iterator[str]:
    found = result.found
    counts = Counter(state(trial) for trial in found.trials)
    counted = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    if found.choice is not None:
        direction = "less" if found.choice.lower_is_better else "more"
        metric = f"made best: {escaped(metric_label(found.choice))}, of which {direction} is better; "
        yield f"{metric}{count_text(len(found.trials), 'trial')} ({counted}) in {_duration(found.seconds)}"
    yield from _latency_text(result)
    yield from _importance_text(result)
    failed = [trial for trial in found.trials if state(trial) == "failed"]
    for trial in failed[:MOST_FAILURES_SHOWN]:
        yield escaped(f"failed: {shown_options(trial.configuration)}: {trial.failure}")
    if len(failed) > MOST_FAILURES_SHOWN:
        yield f"failed: {len(failed) - MOST_FAILURES_SHOWN} more; --json has all"
    if found.reference is not None and not found.outputs:
        yield UNCOMPARED
    yield from map(escaped, result.warnings)


def _latency_text(result: TuneResult) -> Iterator[str]:
    """The percentiles of the default and of what was kept, in their last launches."""
    kept = result.kept
    trial = next((each for each in reversed(result.trials) if kept and each.configuration == kept), None)
    rows = [("the default", result.found.baseline[-1]["metrics"])] if result.found.baseline else []
    rows += [] if trial is None else [("this", trial.facts.get("metrics", {}))]
    for name, metrics in rows if result.goal.latency else ():
        figures = ", ".join(f"{key.removeprefix('latency ')} {value:.3g}" for key, value in metrics.items())
        yield escaped(f"latencies of {name}: {figures}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _importance_text(result: TuneResult) -> Iterator[str]:
    """Which settings made the difference between trials."""
    shares = sorted(result.found.importance.items(), key=lambda each: -each[1])
    named = [f"{name.replace('_', '-')} {share:.0%}" for name, share in shares if share >= LEAST_IMPORTANCE]
    if named:
        yield f"what made the difference between trials: {', '.join(named)}"


def _usage_lines(result: TuneResult) -> Iterator[str]:
    if result.profile is not None:
        yield escaped(f"profile: {result.profile}")
    if result.command is not None:
        yield f"  {escaped(shlex.join(result.command))}"
