"""A search's result, and its JSON. Pure."""

from __future__ import annotations

import shlex

from cpulaunch.measure.comparison_text import metric_label
from cpulaunch.measure.metric_choice import is_rate_or_time
from cpulaunch.measure.tuning.search import best_trial
from cpulaunch.measure.tuning.space import options_of, value_text
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.samples import MetricChoice
    from cpulaunch.measure.tuning.finalists import Finalist
    from cpulaunch.measure.tuning.identity import StudyIdentity
    from cpulaunch.measure.tuning.space import Configuration
    from cpulaunch.measure.tuning.study import TuningTrial
    from cpulaunch.measure.tuning.tuner import Tuned, TuneGoal, TuneLimits

DEFAULT = "(the default)"


@record
class TuneResult:
    """Everything that a search found.

    `options`: those of all launches, as they are shown. `plan`, `default_plan`: plans as JSON data; None if there is no
    winner, or no plan. `profile`: the file that was written; None if there is nothing to write. `command`: the command
    line with what was found. `study`: the folder of the trials. `warnings`: what else there is to know, a line each.
    """

    identity: StudyIdentity
    options: tuple[str, ...]
    goal: TuneGoal
    limits: TuneLimits
    found: Tuned
    version: str = ""
    host: str = ""
    started: str = ""
    plan: Mapping[str, Any] | None = None
    default_plan: Mapping[str, Any] | None = None
    profile: str | None = None
    command: tuple[str, ...] | None = None
    study: str = ""
    warnings: tuple[str, ...] = field(default=())

    @property
    def trials(self) -> Sequence[TuningTrial]:
        """All trials that have ended."""
        return self.found.trials

    @property
    def best(self) -> TuningTrial | None:
        """The best trial that this process measured, and that the final round has not refuted; None without one."""
        refuted = [each.configuration for each in self.found.final.finalists if each.is_refuted]
        measured = [each for each in self.trials if not each.earlier and not each.facts.get("repeated")]
        return best_trial([each for each in measured if each.configuration not in refuted])

    @property
    def kept(self) -> Configuration | None:
        """The configuration that is kept: the winner's; after Ctrl-C before a verdict, the best trial's of this search.

        Trials of an earlier one were measured in circumstances that may have changed.
        """
        if self.found.final.winner is not None:
            return self.found.final.winner.configuration
        best = self.best if self.unconfirmed else None
        return best.configuration if best is not None and best.configuration and (best.ratio or 0) > 1 else None

    @property
    def unconfirmed(self) -> bool:
        """Whether Ctrl-C came before the final round could say anything."""
        return self.found.ended == "interrupted" and self.found.final.winner is None


def result_json(result: TuneResult) -> dict[str, Any]:
    """The result as JSON data, schema 1."""
    found = result.found
    return {
        "schema": 1,
        "cpulaunch": result.version,
        "host": result.host,
        "started": result.started,
        "seconds": round(found.seconds, 1),
        "ended": found.ended,
        "program": list(result.identity.program),
        "options": list(result.options),
        "machine": dict(result.identity.machine),
        "versions": dict(result.identity.versions),
        "metric": None if found.choice is None else _metric_json(found.choice),
        "throughput": result.goal.throughput,
        "latency": {"rate": result.goal.rate} if result.goal.latency else None,
        "limits": {
            "trials": result.limits.trials,
            "seconds": result.limits.seconds,
            "launch_seconds": result.limits.launch_seconds,
        },
        "max_error": result.goal.max_error,
        "outputs": list(found.outputs),
        "space": [{"setting": each.name, "values": list(each.texts())} for each in result.identity.space],
        "reference": None if found.reference is None else _reference_json(result),
        "baseline": [dict(each) for each in found.baseline],
        "trials": [_trial_json(trial) for trial in found.trials],
        "importance": dict(found.importance),
        "final": {
            "default": list(found.final.default),
            "finalists": [_finalist_json(each) for each in found.final.finalists],
        },
        "winner": _winner_json(result),
        "default_plan": result.default_plan,
        "verdict": verdict(result),
        "warnings": list(result.warnings),
        "study": result.study,
    }


def _metric_json(choice: MetricChoice) -> dict[str, Any]:
    source = "output" if choice.pattern is not None else "wall time" if choice.name is None else "program"
    return {"name": metric_label(choice), "source": source, "lower_is_better": choice.lower_is_better}


def _reference_json(result: TuneResult) -> dict[str, Any]:
    sample = result.found.reference
    assert sample is not None
    return {"seconds": round(sample.seconds, 3), "metrics": dict(sample.metrics)}


def _settings(configuration: Configuration) -> dict[str, str]:
    return {name: value_text(name, value) for name, value in configuration.items()}


def _trial_json(trial: TuningTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "started": trial.started,
        "ended": trial.ended,
        "settings": _settings(trial.configuration),
        "options": list(options_of(trial.configuration)),
        "state": state(trial),
        "ratio": None if trial.ratio is None else round(trial.ratio, 5),
        "values": list(trial.facts.get("values", ())),
        "metrics": dict(trial.facts.get("metrics", {})),
        "seconds": float(trial.facts.get("seconds", 0.0)),
        "disturbed": list(trial.facts.get("disturbed", ())),
        "failure": trial.failure,
    }


def state(trial: TuningTrial) -> str:
    """What became of a trial: `measured`, `cut short`, `repeated` or `failed`."""
    if trial.facts.get("repeated"):
        return "repeated"
    if trial.ratio is None:
        return "failed"
    return "cut short" if trial.pruned else "measured"


def _finalist_json(finalist: Finalist) -> dict[str, Any]:
    estimate = finalist.estimate
    return {
        "settings": _settings(finalist.configuration),
        "options": list(options_of(finalist.configuration)),
        "values": list(finalist.values),
        "ratio": None if estimate is None else round(estimate.ratio, 5),
        "low": None if estimate is None or estimate.low is None else round(estimate.low, 5),
        "high": None if estimate is None or estimate.high is None else round(estimate.high, 5),
        "rounds": 0 if estimate is None else estimate.rounds,
        "failure": finalist.failure,
    }


def _winner_json(result: TuneResult) -> dict[str, Any] | None:
    kept = result.kept
    if kept is None:
        return None
    winner = result.found.final.winner
    return {
        "settings": _settings(kept),
        "options": list(options_of(kept)),
        "confirmed": winner is not None,
        "ratio": kept_ratio(result),
        "low": None if winner is None or winner.estimate is None else winner.estimate.low,
        "high": None if winner is None or winner.estimate is None else winner.estimate.high,
        "plan": result.plan,
        "environment": [
            {"name": name, "default": before, "winner": after}
            for name, before, after in environment_difference(result.default_plan, result.plan)
        ],
        "profile": result.profile,
        "command": None if result.command is None else list(result.command),
    }


def kept_ratio(result: TuneResult) -> float | None:
    """How many times as good as the default the kept configuration is; of an unconfirmed one, in its trial."""
    winner = result.found.final.winner
    if winner is not None and winner.estimate is not None:
        return round(winner.estimate.ratio, 5)
    best = result.best
    return None if best is None or best.ratio is None else round(best.ratio, 5)


def environment_difference(
    default: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> Iterator[tuple[str, str | None, str | None]]:
    """The variables that differ between the first workers of two plans: name, and both values; None: not set."""
    if default is None or other is None or not default["workers"] or not other["workers"]:
        return
    before, after = default["workers"][0]["env"], other["workers"][0]["env"]
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def verdict(result: TuneResult) -> str:
    """What was found, in a sentence."""
    winner = result.found.final.winner
    choice = result.found.choice
    quality = "fast" if choice is None or is_rate_or_time(metric_label(choice)) else "good"
    if winner is not None and winner.estimate is not None:
        found = winner.estimate
        return (
            f"{shown_options(winner.configuration)} is {found.ratio:.2f} times as {quality} as the default, "
            f"between {found.low:.2f} and {found.high:.2f}; {found.rounds} rounds"
        )
    kept = result.kept
    if kept is not None:
        return f"interrupted: {shown_options(kept)} was best so far; no final round has confirmed it"
    if result.found.ended == "interrupted":
        return "interrupted before anything was found"
    if not result.trials:
        return "no verdict: the time was over before a trial; give it more (--minutes)"
    if not any(trial.ratio is not None for trial in result.trials):
        return "no trial succeeded; the default stays best"
    finalists = result.found.final.finalists
    if finalists and all(each.failure is not None for each in finalists):
        return "every trial of the final round failed in it; the default stays best"
    if any(each.failure is None and (each.estimate is None or each.estimate.low is None) for each in finalists):
        return "no verdict: the final round had too few rounds for one; give it more time (--minutes)"
    return "nothing was found that this machine can show to be better than the default"


def shown_options(configuration: Configuration) -> str:
    """The options of a configuration, for a person."""
    return shlex.join(options_of(configuration)) or DEFAULT
