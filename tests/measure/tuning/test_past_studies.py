"""What earlier studies say of a new one: whose program they are of, and what has changed since."""

import pytest

from cpulaunch.measure.tuning.identity import StudyIdentity
from cpulaunch.measure.tuning.outcome.past import PastStudy, changes_since, past_configurations
from cpulaunch.measure.tuning.space import Dimension

SPACE = (Dimension(name="threads", values=(None, 1, 2)),)


def earlier(*program, torch="2.12", place="/here", threads="1"):
    return PastStudy(
        folder="/state",
        program=program,
        place=place,
        machine={"cpu": "a CPU"},
        versions={"torch": torch},
        settings={"threads": threads},
    )


def now(*program):
    return StudyIdentity(
        program=program,
        content="",
        machine={"cpu": "a CPU"},
        versions={"torch": "2.13"},
        options=(),
        metric=None,
        max_error=None,
        space=SPACE,
        folder="/here",
    )


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (("a.py", "--batch", "1"), ("a.py", "--batch", "2"), True),
        (("a.py",), ("b.py",), False),
        (("-m", "train", "x"), ("-m", "train"), True),
        (("-m", "train"), ("-m", "serve"), False),
        (("--no-python", "train"), ("--no-python", "serve"), False),
        (("--no-python", "serve", "a"), ("--no-python", "serve", "b"), True),
    ],
)
def test_a_change_is_told_of_the_same_program_alone(before, after, is_same):
    assert list(changes_since([earlier(*before)], now(*after))) == (["torch was 2.12, is 2.13"] if is_same else [])
    assert list(changes_since([earlier(*before, place="/elsewhere")], now(*after))) == []
    assert list(changes_since([earlier(*before), earlier(*before, torch="2.13")], now(*after))) == []


def test_what_won_for_the_same_program_comes_first():
    studies = [earlier("-m", "train", threads="1"), earlier("-m", "serve", threads="2")]
    assert past_configurations(studies, now("-m", "serve"), SPACE) == ({"threads": 2}, {"threads": 1})
