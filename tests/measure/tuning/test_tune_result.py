"""What is kept of a search."""

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.statistics import Estimate
from cpulaunch.measure.tuning.finalists import Finalist, FinalRound
from cpulaunch.measure.tuning.identity import StudyIdentity
from cpulaunch.measure.tuning.outcome.result import TuneResult, kept_ratio, verdict
from cpulaunch.measure.tuning.study import TuningTrial
from cpulaunch.measure.tuning.tuner import Tuned, TuneGoal, TuneLimits

IDENTITY = StudyIdentity(
    program=("a.py",),
    content="",
    machine={},
    versions={},
    options=(),
    metric=None,
    max_error=None,
    space=(),
    folder="/",
)


def interrupted(*trials, final=(), ended="interrupted"):
    found = Tuned(ended=ended, trials=trials, final=FinalRound(finalists=final, interrupted=ended == "interrupted"))
    return TuneResult(identity=IDENTITY, options=(), goal=TuneGoal(), limits=TuneLimits(), found=found)


def test_an_unconfirmed_best_is_of_the_search_that_was_interrupted():
    earlier = TuningTrial(number=0, configuration={"smt": True}, ratio=3.0, facts={}, earlier=True)
    now = TuningTrial(number=1, configuration={"threads": 1}, ratio=1.2, facts={})
    result = interrupted(earlier, now)
    assert (result.kept, kept_ratio(result)) == ({"threads": 1}, 1.2)
    assert interrupted(earlier).kept is None


FAST = TuningTrial(number=0, configuration={"threads": 1}, ratio=3.0, facts={})
SAME = TuningTrial(number=1, configuration={"threads": 1, "smt": False}, ratio=3.0, facts={"repeated": True})
NEXT = TuningTrial(number=2, configuration={"threads": 2}, ratio=1.2, facts={})


@pytest.mark.parametrize(
    "finalist",
    [
        Finalist(configuration={"threads": 1}, failure="output 'logits' differs by 0.5"),
        Finalist(configuration={"threads": 1}, estimate=Estimate(ratio=0.9, low=None, high=None, rounds=5)),
    ],
    ids=["failed", "slower"],
)
def test_what_the_final_round_has_refuted_is_not_kept_after_an_interrupt(finalist):
    assert interrupted(FAST, SAME, NEXT).kept == {"threads": 1}
    result = interrupted(FAST, SAME, NEXT, final=(finalist,))
    assert (result.kept, kept_ratio(result)) == ({"threads": 2}, 1.2)
    one_round = Finalist(configuration={"threads": 1}, estimate=Estimate(ratio=0.99, low=None, high=None, rounds=1))
    assert interrupted(FAST, SAME, NEXT, final=(one_round,)).kept == {"threads": 1}
    nothing = interrupted(FAST, SAME, final=(finalist,))
    assert (nothing.kept, verdict(nothing)) == (None, "interrupted before anything was found")


FAILED = Finalist(configuration={"threads": 2}, failure="SIGSEGV ended it")


@pytest.mark.parametrize(
    ("final", "text"),
    [
        ((Finalist(configuration={"threads": 1}),), "no verdict: the final round had too few rounds"),
        ((FAILED, Finalist(configuration={"threads": 1})), "no verdict: the final round had too few rounds"),
        ((FAILED,), "every trial of the final round failed in it"),
        ((), "nothing was found that this machine can show"),
    ],
    ids=["no time", "no time for the other", "failed", "none was near the default"],
)
def test_what_was_not_measured_again_has_no_verdict(final, text):
    assert verdict(interrupted(FAST, final=final, ended="finished")).startswith(text)
