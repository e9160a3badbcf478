"""The search: what is known first, then what a model of the effects expects most of, and what TPE draws."""

from __future__ import annotations

import math
from itertools import product

from cpulaunch.measure.tuning.model import learned
from cpulaunch.measure.tuning.trial import FIRST_NOISE, MARGIN, Baseline, Guard, is_disturbed, measure_trial, speed
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import TypeAlias

    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.space import Configuration, Dimension
    from cpulaunch.measure.tuning.study import Study, TuningTrial

    Results: TypeAlias = "dict[Hashable, int | None]"
    """By effect: the number of the trial that had it; None: the default."""

BASELINE_EVERY = 4
"""Trials between two measurements of the default, which show drift; after one that was disturbed it is the next."""
FIRST_BASELINES = 2
"""Samples of the default before the first trial; one more decides if they differ by more than FIRST_NOISE."""
DRAWN_FROM = 16
"""Trials after which TPE draws every second one; before, a model of single effects and pairs chooses."""
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


def _measure_first_baselines(setup: SearchSetup, study: Study, baseline: Baseline) -> None:
    """Effect: the baseline has so many samples that one accident does not decide what all trials are compared with."""
    for _ in range(FIRST_BASELINES):
        _add_baseline(setup, study, baseline)
    if len(baseline.speeds) < FIRST_BASELINES or baseline.spread > FIRST_NOISE:
        _add_baseline(setup, study, baseline)


def measure_baseline(setup: SearchSetup, study: Study, baseline: Baseline) -> None:
    """Effect: the baseline and the study have one more sample, or two if the first was disturbed and is another one."""
    before, noise = baseline.now, baseline.noise
    sample = _add_baseline(setup, study, baseline)
    if is_disturbed(sample) and abs(math.log(baseline.speeds[-1] / before)) > MARGIN * noise:
        _add_baseline(setup, study, baseline)


def _add_baseline(setup: SearchSetup, study: Study, baseline: Baseline) -> Sample:
    """A sample of the default. Effect: the baseline and the study have it, but for a later one that fails: an accident.

    Raises: CpulaunchError if the first one fails.
    """
    sample = setup.launch({})
    failure = setup.guard.failure(sample)
    if failure is None and sample.value is not None:
        now = speed(sample, lower_is_better=setup.lower_is_better)
        baseline.add(now)
        study.add_baseline(sample.value, sample.seconds, sample.metrics, speed=now)
    elif not baseline.speeds:
        raise CpulaunchError(
            "the program fails under cpulaunch's defaults", value=failure, hint="run it once with cpulaunch alone"
        )
    return sample


def run_search(setup: SearchSetup, study: Study, baseline: Baseline, first: Sequence[Configuration]) -> None:
    """Effect: trials are added to the study until their number or the time is used up, or nothing new is left.

    `first`: the configurations to begin with. The default is measured beside them, not among them.
    """
    results: Results = {setup.effect({}): None}
    for trial in study.trials():
        results.setdefault(setup.effect(trial.configuration), trial.number)
    queue = [each for each in first if each and setup.effect(each) not in results]
    repeated, measured = 0, 0
    if not baseline.speeds:
        _measure_first_baselines(setup, study, baseline)
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
            results[effect] = number
            disturbed = _measure(setup, study, baseline, number, configuration)
            repeated, measured = 0, measured + 1
            if disturbed or measured == BASELINE_EVERY:
                measure_baseline(setup, study, baseline)
                measured = 0


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
    promising = learned(setup.space, trials).promising()
    return next((each for each in promising if setup.effect(each) not in results), None)


def _repeat(study: Study, number: int, same: int | None) -> None:
    """Effect: the trial ends as the one that does the same on this machine; it is not launched again."""
    facts = {"values": [], "seconds": 0.0, "repeated": True, "same_as": same}
    trial = next((each for each in study.trials() if each.number == same), None)
    if trial is not None and trial.ratio is None:
        study.fail(number, trial.failure or "it failed before", facts)
    else:
        study.finish(number, 1.0 if trial is None or trial.ratio is None else trial.ratio, facts, pruned=True)


def _measure(setup: SearchSetup, study: Study, baseline: Baseline, number: int, configuration: Configuration) -> bool:
    """Whether a sample of the trial was disturbed. Effect: measures it, and tells of it."""
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
    return bool(result.facts["disturbed"])
