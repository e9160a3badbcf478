"""What is kept of a search."""

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.tuning.identity import StudyIdentity
from cpulaunch.measure.tuning.outcome.result import TuneResult, kept_ratio
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


def interrupted(*trials):
    found = Tuned(ended="interrupted", trials=trials)
    return TuneResult(identity=IDENTITY, options=(), goal=TuneGoal(), limits=TuneLimits(), found=found)


def test_an_unconfirmed_best_is_of_the_search_that_was_interrupted():
    earlier = TuningTrial(number=0, configuration={"smt": True}, ratio=3.0, facts={}, earlier=True)
    now = TuningTrial(number=1, configuration={"threads": 1}, ratio=1.2, facts={})
    result = interrupted(earlier, now)
    assert (result.kept, kept_ratio(result)) == ({"threads": 1}, 1.2)
    assert interrupted(earlier).kept is None
