"""A whole tuning on a clock that its launches turn: what it does with its time."""

import math

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.metric_choice import overload_text
from cpulaunch.measure.samples import MetricChoice, Sample
from cpulaunch.measure.tuning.study import Study
from cpulaunch.measure.tuning.tuner import TuneGoal, TuneLimits, TuneMeans, Tuner
from cpulaunch.records.errors import CpulaunchError
from tests.measure.tuning.recorded import SPACE


class Clock:
    """`seconds`: a function from a configuration, None for plain Python, to how long its launch takes."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0
        self.launches = 0

    def take(self, configuration, choice, limit_seconds):
        needed = self.seconds(configuration) * (1 + 0.003 * (self.launches * 7 % 5 - 2))
        self.launches += 1
        self.now += min(needed, limit_seconds)
        if needed > limit_seconds:
            failure = f"it was still running after {limit_seconds:g} s"
            return Sample(value=None, seconds=limit_seconds, failure=failure, exit_code=None)
        return Sample(value=needed, seconds=needed)

    def tune(self, **limits):
        means = TuneMeans(
            space=SPACE,
            take=self.take,
            effect=lambda configuration: frozenset(configuration.items()),
            clock=lambda: self.now,
            progress=lambda text: None,
            seed=10,
        )
        study = Study(None, SPACE, seed=1)
        try:
            return Tuner(means, TuneLimits(**limits), TuneGoal(choice=MetricChoice())).run(study)
        finally:
            study.close()


@pytest.mark.parametrize("seconds", [5, 40, 60])
def test_half_an_hour_suffices_for_a_verdict_on_long_launches(seconds):
    clock = Clock(lambda configuration: seconds / (2 if (configuration or {}).get("threads") else 1))
    found = clock.tune()
    assert found.final.winner is not None
    assert found.final.winner.configuration["threads"] == 1
    assert math.isclose(found.final.winner.estimate.ratio, 2, rel_tol=0.02)
    assert clock.now <= 1800 + 3 * seconds


def test_as_many_finalists_as_there_is_time_for():
    few, many = (Clock(lambda configuration, each=each: each).tune() for each in (60, 5))
    assert (len(few.final.finalists), len(many.final.finalists)) == (1, 3)


def test_without_a_trial_that_may_win_there_is_no_final_round():
    found = Clock(lambda configuration: 20 if configuration else 5).tune(trials=3)
    assert (len(found.trials), found.final.finalists) == (3, ())


def test_a_default_that_hangs_does_not_take_all_the_time():
    clock = Clock(lambda configuration: 10 if configuration is None else math.inf)
    with pytest.raises(CpulaunchError, match="fails under cpulaunch's defaults"):
        clock.tune()
    assert clock.now < 200


@pytest.mark.parametrize(
    ("name", "said"),
    [("latency p95 (ms)", "cannot bear the load"), ("latency p59 (ms)", "fails without cpulaunch")],
)
def test_a_metric_that_is_not_reported_is_no_matter_of_the_load(name, said):
    metrics = {"latency p95 (ms)": 9.0, "offered load": 2.0}
    failure = overload_text(name, metrics) if name in metrics else f"it reported no metric {name!r}"
    means = TuneMeans(
        space=SPACE,
        take=lambda configuration, choice, limit: Sample(value=None, seconds=1.0, metrics=metrics, failure=failure),
        effect=lambda configuration: frozenset(configuration.items()),
        clock=lambda: 0.0,
        progress=lambda text: None,
        seed=10,
    )
    study = Study(None, SPACE, seed=1)
    with pytest.raises(CpulaunchError, match=said):
        Tuner(means, TuneLimits(), TuneGoal(choice=MetricChoice(name=name), latency=True)).run(study)
