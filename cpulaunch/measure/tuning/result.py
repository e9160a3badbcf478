"""A search's result as JSON and in words. Pure."""

from __future__ import annotations

import shlex

from cpulaunch.measure.tuning.finalists import FinalRound
from cpulaunch.measure.tuning.search import best_trial
from cpulaunch.measure.tuning.space import options_of, value_text
from cpulaunch.records.errors import escaped
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, TypeAlias

    from cpulaunch.measure.tuning.finalists import Finalist
    from cpulaunch.measure.tuning.space import Configuration, Dimension
    from cpulaunch.measure.tuning.study import TuningTrial

    Ending: TypeAlias = 'Literal["finished", "interrupted"]'

DEFAULT = "(cpulaunch's defaults)"
MOST_FAILURES_SHOWN = 5


@record
class TuneResult:
    """Everything that a search found. `program`, `options`: its words, and the options of all launches.

    `profile`: the file that was written; None if there is nothing to write. `study`: the folder of the trials.
    """

    program: tuple[str, ...]
    options: tuple[str, ...]
    metric: str
    lower_is_better: bool
    max_error: float | None
    compared: bool
    space: Sequence[Dimension]
    trials: Sequence[TuningTrial]
    baseline: Sequence[float]
    final: FinalRound
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    importance: Mapping[str, float] = field(default_factory=dict)
    ended: Ending = "finished"
    seconds: float = 0.0
    profile: str | None = None
    study: str = ""

    @property
    def kept(self) -> Configuration | None:
        """The configuration that is kept: the winner's; after Ctrl-C before a verdict, the best trial's."""
        if self.final.winner is not None:
            return self.final.winner.configuration
        best = best_trial(self.trials) if self.unconfirmed else None
        return best.configuration if best is not None and best.configuration and (best.ratio or 0) > 1 else None

    @property
    def unconfirmed(self) -> bool:
        """Whether Ctrl-C came before the final round could say anything."""
        return self.ended == "interrupted" and self.final.winner is None


def result_json(result: TuneResult) -> dict[str, Any]:
    """The result as JSON data, schema 1."""
    kept = result.kept
    return {
        "schema": 1,
        "program": list(result.program),
        "options": list(result.options),
        "machine": dict(result.machine),
        "versions": dict(result.versions),
        "metric": result.metric,
        "lower_is_better": result.lower_is_better,
        "max_error": result.max_error,
        "outputs_compared": result.compared,
        "ended": result.ended,
        "seconds": round(result.seconds, 1),
        "space": [{"setting": each.name, "values": list(each.texts())} for each in result.space],
        "baseline": list(result.baseline),
        "trials": [_trial_json(trial) for trial in result.trials],
        "importance": dict(result.importance),
        "final": {
            "default": list(result.final.default),
            "finalists": [_finalist_json(each) for each in result.final.finalists],
        },
        "winner": None if kept is None else {"settings": _settings(kept), "options": list(options_of(kept))},
        "confirmed": result.final.winner is not None,
        "verdict": verdict(result),
        "profile": result.profile,
        "study": result.study,
    }


def _settings(configuration: Configuration) -> dict[str, str]:
    return {name: value_text(name, value) for name, value in configuration.items()}


def _trial_json(trial: TuningTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "settings": _settings(trial.configuration),
        "options": list(options_of(trial.configuration)),
        "state": state(trial),
        "speedup": None if trial.ratio is None else round(trial.ratio, 5),
        "values": list(trial.facts.get("values", ())),
        "seconds": float(trial.facts.get("seconds", 0.0)),
        "failure": trial.failure,
    }


def state(trial: TuningTrial) -> str:
    """What became of a trial: `measured`, `cut short`, `repeated` or `failed`."""
    if trial.ratio is None:
        return "failed"
    if trial.facts.get("repeated"):
        return "repeated"
    return "cut short" if trial.pruned else "measured"


def _finalist_json(finalist: Finalist) -> dict[str, Any]:
    estimate = finalist.estimate
    return {
        "settings": _settings(finalist.configuration),
        "options": list(options_of(finalist.configuration)),
        "values": list(finalist.values),
        "speedup": None if estimate is None else round(estimate.ratio, 5),
        "low": None if estimate is None or estimate.low is None else round(estimate.low, 5),
        "high": None if estimate is None or estimate.high is None else round(estimate.high, 5),
        "failure": finalist.failure,
    }


def verdict(result: TuneResult) -> str:
    """What was found, in a sentence."""
    winner = result.final.winner
    if winner is not None and winner.estimate is not None:
        found = winner.estimate
        return (
            f"{shown_options(winner.configuration)} is {found.ratio:.2f} times as fast as cpulaunch's defaults, "
            f"between {found.low:.2f} and {found.high:.2f}; {found.rounds} rounds"
        )
    kept = result.kept
    if kept is not None:
        return f"interrupted: {shown_options(kept)} was best so far; no final round has confirmed it"
    if result.ended == "interrupted":
        return "interrupted before anything was found"
    if not any(trial.ratio is not None for trial in result.trials):
        return "no trial succeeded; cpulaunch's defaults stay best"
    return "nothing was found that this machine can show to be faster than cpulaunch's defaults"


def shown_options(configuration: Configuration) -> str:
    """The options of a configuration, for a person."""
    return shlex.join(options_of(configuration)) or DEFAULT


def result_text(result: TuneResult, *, command: str) -> str:
    """The result for a person. `command`: the command line that uses it."""
    lines = [verdict(result), ""]
    failed = [trial for trial in result.trials if trial.ratio is None]
    cut = sum(trial.pruned for trial in result.trials)
    lines += [f"{len(result.trials)} trials ({cut} cut short, {len(failed)} failed), metric {result.metric}"]
    for finalist in result.final.finalists:
        lines += [f"  {_finalist_text(finalist)}"]
    for trial in failed[:MOST_FAILURES_SHOWN]:
        lines += [escaped(f"  failed: {shown_options(trial.configuration)}: {trial.failure}")]
    if len(failed) > MOST_FAILURES_SHOWN:
        lines += [f"  failed: {len(failed) - MOST_FAILURES_SHOWN} more (--json has all)"]
    if not result.compared:
        lines += ["", "outputs were not compared: the program calls no cpulaunch.checksum(), and --output is not given"]
    if result.profile is not None:
        lines += ["", f"profile: {result.profile}", f"use it:  {command}"]
    return "\n".join(lines)


def _finalist_text(finalist: Finalist) -> str:
    shown = shown_options(finalist.configuration)
    if finalist.failure is not None:
        return escaped(f"failed: {shown}: {finalist.failure}")
    estimate = finalist.estimate
    if estimate is None:
        return f"{shown}: not measured again"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.ratio:.3f}  {shown}: too few rounds for a verdict"
    return f"{estimate.ratio:.3f}  [{estimate.low:.3f}, {estimate.high:.3f}]  {shown}"
