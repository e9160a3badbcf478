"""The search: what is known first, then what a model of the effects expects most of, and what TPE draws."""

from __future__ import annotations

import math
from itertools import product

from cpulaunch.measure.tuning.model import FAILED, EffectModel
from cpulaunch.measure.tuning.trial import Baseline, Guard, measure_trial, speed
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import TypeAlias

    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.space import Configuration, Dimension
    from cpulaunch.measure.tuning.study import Study, TuningTrial

    Results: TypeAlias = "dict[Hashable, tuple[float | None, str | None]]"
    """By effect: the ratio of the trial that had it, or why it failed."""

BASELINE_EVERY = 4
"""Trials between two measurements of the default, which show drift."""
DRAWN_FROM = 16
"""Trials after which TPE draws every second one; before, a model of single effects and pairs chooses."""
MODEL_NOISE = 0.03
SMALL_SPACE = 256
"""Configurations of a space that are all looked at, to end a search when nothing is left."""
MAX_REPEATED = 30
"""Configurations in a row that were tried before: nothing new is left."""


@record
class SearchSetup:
    """A search's means. `launch`: a sample of a configuration; `plain`: of the program under plain Python.

    `effect`: what a configuration does on this machine, equal for configurations that do the same; None if it cannot be
    planned. `seconds_left`: of the search's time. `notify`: takes each trial that has ended, and the best one so far.
    """

    space: Sequence[Dimension]
    launch: Callable[[Configuration], Sample]
    effect: Callable[[Configuration], Hashable]
    seconds_left: Callable[[], float]
    guard: Guard
    lower_is_better: bool
    max_trials: int
    notify: Callable[[TuningTrial, TuningTrial | None], None]
    repeats: int = 3


def best_trial(trials: Sequence[TuningTrial]) -> TuningTrial | None:
    """The fastest trial that did not fail, preferring those that were measured more than once; None without one."""
    usable = [trial for trial in trials if trial.ratio is not None]
    return max(usable, key=lambda trial: (not trial.pruned, trial.ratio or 0.0), default=None)


def measure_baseline(setup: SearchSetup, study: Study, baseline: Baseline) -> None:
    """Effect: the baseline and the study have one more sample. A later one that fails is left out: an accident.

    Raises: CpulaunchError if the first one fails.
    """
    sample = setup.launch({})
    failure = setup.guard.failure(sample)
    if failure is None and sample.value is not None:
        baseline.add(speed(sample, lower_is_better=setup.lower_is_better))
        study.add_baseline(sample.value, sample.seconds, sample.metrics)
    elif not baseline.speeds:
        raise CpulaunchError(
            "the program fails under cpulaunch's defaults", value=failure, hint="run it once with cpulaunch alone"
        )


def run_search(setup: SearchSetup, study: Study, baseline: Baseline, first: Sequence[Configuration]) -> None:
    """Effect: trials are added to the study until their number or the time is used up, or nothing new is left.

    `first`: the configurations to begin with. The default is measured beside them, not among them.
    """
    results: Results = {setup.effect({}): (1.0, None)}
    for trial in study.trials():
        results.setdefault(setup.effect(trial.configuration), (trial.ratio, trial.failure))
    queue = [each for each in first if each and setup.effect(each) not in results]
    repeated, measured = 0, 0
    if not baseline.speeds:
        measure_baseline(setup, study, baseline)
    while len(study.trials()) < setup.max_trials and setup.seconds_left() > 0 and repeated < MAX_REPEATED:
        if _is_exhausted(setup, results):
            break
        number, configuration = study.begin(_next(setup, study, queue, results))
        effect = setup.effect(configuration)
        if effect is None:
            study.fail(number, "cpulaunch cannot plan it", {"values": [], "seconds": 0.0})
            repeated += 1
        elif effect in results:
            _repeat(study, number, results[effect])
            repeated += 1
        else:
            results[effect] = _measure(setup, study, baseline, number, configuration)
            repeated, measured = 0, measured + 1
            if measured % BASELINE_EVERY == 0:
                measure_baseline(setup, study, baseline)


def _is_exhausted(setup: SearchSetup, results: Results) -> bool:
    """Whether a small space has no configuration left that has not been tried, or does what one that was tried does."""
    if math.prod(len(each.values) for each in setup.space) > SMALL_SPACE:
        return False
    names = [each.name for each in setup.space]
    for values in product(*(each.values for each in setup.space)):
        chosen = zip(names, values, strict=True)
        effect = setup.effect({name: value for name, value in chosen if value is not None})
        if effect is not None and effect not in results:
            return False
    return True


def _next(setup: SearchSetup, study: Study, queue: list[Configuration], results: Results) -> Configuration | None:
    """The configuration to try next; None: what TPE draws. Effect: takes it from the queue."""
    if study.waiting:
        return None
    while queue:
        configuration = queue.pop(0)
        if setup.effect(configuration) not in results:
            return configuration
    trials = study.trials()
    if len(trials) >= DRAWN_FROM and len(trials) % 2:
        return None
    model = EffectModel(setup.space, noise=MODEL_NOISE)
    for trial in trials:
        model.learn(trial.configuration, FAILED if trial.ratio is None else math.log(trial.ratio))
    return next((each for each in model.promising() if setup.effect(each) not in results), None)


def _repeat(study: Study, number: int, result: tuple[float | None, str | None]) -> None:
    """Effect: the trial ends as the one that does the same on this machine; it is not launched again."""
    ratio, failure = result
    if ratio is None:
        study.fail(number, failure or "it failed before", {"values": [], "seconds": 0.0, "repeated": True})
    else:
        study.finish(number, ratio, {"values": [], "seconds": 0.0, "repeated": True}, pruned=True)


def _measure(
    setup: SearchSetup, study: Study, baseline: Baseline, number: int, configuration: Configuration
) -> tuple[float | None, str | None]:
    best = best_trial(study.trials())
    result = measure_trial(
        lambda: setup.launch(configuration),
        setup.guard,
        baseline,
        best=max(1.0, (best.ratio or 1.0) if best is not None else 1.0),
        lower_is_better=setup.lower_is_better,
        repeats=setup.repeats,
    )
    if result.ratio is None:
        study.fail(number, result.failure or "it failed", result.facts)
    else:
        study.finish(number, result.ratio, result.facts, pruned=result.pruned)
    trials = study.trials()
    setup.notify(next(trial for trial in reversed(trials) if trial.number == number), best_trial(trials))
    return result.ratio, result.failure
