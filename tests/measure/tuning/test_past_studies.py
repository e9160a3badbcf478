"""What earlier studies say of a new one: whose program they are of, and what has changed since."""

import os
from pathlib import Path

import pytest

from cpulaunch.measure.tuning.identity import StudyIdentity
from cpulaunch.measure.tuning.outcome import past
from cpulaunch.measure.tuning.outcome.past import PastStudy, changes_since, past_configurations, past_studies
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


def test_only_the_latest_studies_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MAX_STUDIES", 3)
    read = list[str]()
    plain = past._read
    monkeypatch.setattr(past, "_read", lambda folder: read.append(Path(folder).name) or plain(folder))
    for number in range(8):
        (folder := tmp_path / "machine" / str(number)).mkdir(parents=True)
        past.write_about(str(folder), now("a.py"), {"threads": number})
        os.utime(folder / past.FILE, (number, number))
    assert [each.settings["threads"] for each in past_studies(str(tmp_path))] == ["7", "6", "5"]
    assert read == ["7", "6", "5"]


def test_a_program_may_have_many_arguments(tmp_path: Path) -> None:
    (folder := tmp_path / "machine" / "study").mkdir(parents=True)
    identity = now("-m", "train", *(f"data/part-{number:05d}.parquet" for number in range(5000)))
    past.write_about(str(folder), identity, {"threads": 2})
    studies = past_studies(str(tmp_path))
    assert past_configurations(studies, now("-m", "train"), SPACE) == ({"threads": 2},)
