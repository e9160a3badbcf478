"""The final round: who is in it, its order, and that only a shown difference is claimed."""

import math
import statistics

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.samples import Sample
from cpulaunch.measure.tuning.finalists import FinalSetup, choose_finalists, run_final_round
from cpulaunch.measure.tuning.study import TuningTrial
from cpulaunch.measure.tuning.trial import Guard
from cpulaunch.records.record import record
from cpulaunch.worker.reporting.checksums import checksum_parts


@record
class Range:
    """The median and the range of ratios, in place of an interval."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def ratio_range(default, own, sides):
    assert sides == 3
    ratios = sorted(b / a for a, b in zip(default, own, strict=True))
    return Range(ratio=statistics.median(ratios), low=ratios[0], high=ratios[-1], rounds=len(ratios))


A, B = {"threads": 1}, {"smt": True}


def final(values, *, rounds=4, lower=False, guard=None, seconds=None):
    """The final round of A and B; `values`: a function from the configuration and the launch's number to a sample."""
    launches = []

    def launch(configuration):
        launches.append(configuration)
        return values(configuration, len(launches))

    setup = FinalSetup(
        launch=launch,
        guard=guard or Guard(),
        estimate=ratio_range,
        lower_is_better=lower,
        rounds=rounds,
        seconds_left=seconds or (lambda: 1.0),
        seed=9,
    )
    return run_final_round(setup, (A, B)), launches


def rates(default, a, b):
    def sample(configuration, number):
        value = default if not configuration else a if configuration == A else b
        return Sample(value=value * (1 + 0.004 * (number * 7 % 5)), seconds=1.0)

    return sample


def test_rounds_are_interleaved_and_some_run_backwards():
    _, launches = final(rates(1, 1, 1), rounds=2)
    assert launches == [{}, A, B, B, A, {}]


def test_the_faster_one_wins():
    result, _ = final(rates(10, 12, 13))
    assert result.winner.configuration == B
    assert math.isclose(result.winner.estimate.ratio, 1.3, rel_tol=0.01)


def test_seconds_are_better_when_fewer():
    result, _ = final(rates(10, 8, 11), lower=True)
    assert result.winner.configuration == A
    assert math.isclose(result.winner.estimate.ratio, 1.25, rel_tol=0.01)


@pytest.mark.parametrize("values", [rates(10, 10, 9), lambda configuration, number: Sample(value=10.0, seconds=1.0)])
def test_nothing_is_claimed_of_what_is_not_shown(values):
    result, _ = final(values)
    assert result.winner is None


def test_a_finalist_that_fails_once_is_out():
    def sample(configuration, number):
        if configuration == B and number > 6:
            return Sample(value=None, seconds=1.0, failure="SIGSEGV ended it")
        return rates(10, 11, 99)(configuration, number)

    result, launches = final(sample)
    assert [each.failure for each in result.finalists] == [None, "SIGSEGV ended it"]
    assert result.winner.configuration == A
    assert launches.count(B) == 3, "it is not launched again"


def test_a_finalist_whose_outputs_become_wrong_is_out():
    right, wrong = checksum_parts(1.0), checksum_parts(2.0)

    def sample(configuration, number):
        outputs = {"a": wrong if configuration == B and number > 6 else right}
        return Sample(value=9.0 if configuration == B else 1.0, seconds=1.0, checksums=outputs)

    result, _ = final(sample, guard=Guard(references=[{"a": right}]))
    assert result.winner is None
    assert "differs by" in result.finalists[1].failure


def test_a_round_without_the_default_does_not_count():
    def sample(configuration, number):
        if not configuration and number == 1:
            return Sample(value=None, seconds=1.0, failure="an accident")
        return rates(10, 12, 11)(configuration, number)

    result, _ = final(sample)
    assert len(result.default) == 3
    assert result.winner.estimate.rounds == 3


def test_an_interrupt_keeps_the_rounds_that_were_complete():
    def sample(configuration, number):
        if number == 8:
            raise KeyboardInterrupt
        return rates(10, 12, 11)(configuration, number)

    result, _ = final(sample)
    assert result.interrupted
    assert (len(result.default), result.winner.configuration) == (2, A)


def test_the_time_ends_it():
    left = iter([1.0, 0.0])
    result, launches = final(rates(1, 2, 3), seconds=lambda: next(left))
    assert (len(launches), result.finalists[0].estimate.rounds) == (3, 1)


def trial(number, configuration, ratio, **more):
    return TuningTrial(
        number=number, configuration=configuration, ratio=ratio, facts={"repeated": more.pop("repeated", False)}, **more
    )


def test_the_best_three_different_trials_are_chosen():
    trials = [
        trial(0, {"threads": 1}, 1.2),
        trial(1, {"threads": 1}, 1.3),
        trial(2, {"smt": True}, 1.5, pruned=True),
        trial(3, {"threads": 2}, None, failure="boom"),
        trial(4, {"threads": 3}, 1.4, repeated=True),
        trial(5, {"threads": 4}, 0.5),
        trial(6, {"threads": 5}, 1.1),
        trial(7, {"threads": 6}, 1.05),
        trial(8, {}, 1.0),
    ]
    assert choose_finalists(trials) == ({"smt": True}, {"threads": 1}, {"threads": 5})
    assert choose_finalists(trials[:4]) == ({"smt": True}, {"threads": 1})
    assert choose_finalists(trials[3:4]) == ()
