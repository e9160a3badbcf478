"""What changed from one saved diagnosis to another, and files that hold none."""

import copy
import json

import pytest

from cpulaunch.measure.diagnosis.changes.change_json import change_json
from cpulaunch.measure.diagnosis.changes.change_text import change_text
from cpulaunch.measure.diagnosis.changes.changes import changed, verdict
from cpulaunch.measure.diagnosis.changes.document import read_document
from cpulaunch.measure.diagnosis.diagnosis import diagnosis_of
from cpulaunch.measure.diagnosis.diagnosis_json import diagnosis_json
from cpulaunch.measure.diagnosis.rates import NO_CEILINGS
from cpulaunch.records.errors import CpulaunchError
from tests import json_output
from tests.measure.diagnosis.given import figures, window
from tests.measure.diagnosis.test_bottlenecks import MACHINE


def document(*processes, host="here", program=("train.py",)):
    found = diagnosis_of(processes, {}, MACHINE, NO_CEILINGS)
    return diagnosis_json(found, program=program, version="1", host=host)


def waits(seconds, *, step=0.1, **changes):
    """A process that waits so long for data in a step."""
    sums = {"data_seconds": 10 * seconds, "data_cpu": 0.0, "thread_cpu": 10 * (step - seconds)}
    seen = window(step - seconds, kinds={"products": step - seconds})
    return figures(step=step, sums=sums, window=seen, loader_workers=0, **changes)


@pytest.fixture
def read(tmp_path):
    """A function from a document to what is read from its file."""

    def written(data, name="a.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return read_document(str(path))

    return written


def test_what_shrank_is_named_first(read):
    found = changed(read(document(waits(0.06))), read(document(waits(0.01, step=0.05))))
    assert found.speedup == pytest.approx(2)
    assert (found.parts[0].name, found.parts[0].seconds) == ("data", pytest.approx(-0.05))
    assert verdict(found) == "steps are 2 times as fast: 100 ms before, 50 ms after; waiting for data shrank by 50 ms"


def test_what_grew_is_named_too(read):
    found = changed(read(document(waits(0.01, step=0.05))), read(document(waits(0.02, step=0.1))))
    assert verdict(found) == (
        "steps take 2 times as long: 50 ms before, 100 ms after; matrix products grew by 40 ms, "
        "waiting for data grew by 10 ms"
    )
    assert [part.name for part in found.parts[:2]] == ["products", "data"]


def test_the_same_diagnosis_twice(read):
    one = read(document(waits(0.06)))
    assert verdict(changed(one, one)) == (
        "steps take as long as before: 100 ms before, 100 ms after; no part of them changed by more than 2%"
    )


def test_the_text_fits_its_width_and_has_a_row_for_each_part(read):
    found = changed(read(document(waits(0.06))), read(document(waits(0.0, step=0.05))))
    text = change_text(found, width=80, strong=str)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "first bottleneck before: data wait, 60% of a step; after: none" in text
    rows = {line.split("  ")[1].strip(): line.split() for line in text.splitlines() if line.startswith("  ")}
    assert rows["waiting for data"][-3:] == ["60%", "to", "0%"]
    assert rows["waiting for data"][3:9] == ["60", "ms", "0", "ms", "-60", "ms"]
    assert rows["all of it"][-2:] == ["-50", "ms"]


def test_json(read):
    found = changed(read(document(waits(0.06))), read(document(waits(0.0, step=0.05))))
    written = json_output.checked("diagnose-compare", change_json(found, ("a.json", "b.json"), version="1"))
    assert written["parts"][0]["change_seconds"] == pytest.approx(-0.06)
    assert (written["before"]["first"]["name"], written["after"]["first"]) == ("data wait", None)


def test_of_ranks_the_mean_is_compared(read):
    ranks = [waits(seconds, rank=rank, index=rank, threads=1) for rank, seconds in ((0, 0.02), (1, 0.06))]
    found = changed(read(document(*ranks)), read(document(waits(0.0, step=0.06, threads=1))))
    assert {part.name: part.seconds for part in found.parts}["data"] == pytest.approx(-0.04)
    assert "their numbers of processes differ, of which these are means: 2 and 1" in found.remarks


def test_what_makes_two_diagnoses_hard_to_compare_is_said(read):
    before = read(document(waits(0.06)))
    after = read(document(waits(0.06, threads=1, steps=3), host="there", program=("-O2", "train.py")))
    said = "\n".join(changed(before, after).remarks)
    for words in ("hosts: here and there", "train.py and -O2 train.py", "threads differ: 2 and 1", "few steps"):
        assert words in said


def test_parts_of_another_version_keep_their_names(read):
    later = document(waits(0.06))
    later["processes"][0]["shares"]["telepathy"] = 0.5
    found = changed(read(document(waits(0.06))), read(later))
    assert found.parts[0].label == "telepathy"


def broken(**changes):
    data = document(waits(0.06))
    for path, value in changes.items():
        *steps, last = path.split("__")
        node = data
        for step in steps:
            node = node[int(step) if step.isdigit() else step]
        node[last] = value
    return data


WRONG = {
    "no JSON": "{",
    "another object": "{}",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another format": broken(schema=2),
    "no processes": broken(processes=[]),
    "no time": broken(processes__0__step_seconds=0),
    "hardly a time": broken(processes__0__step_seconds=1e-300),
    "too long a time": broken(processes__0__step_seconds=1e300),
    "no numbers": broken(processes__0__shares={"data": "much"}),
    "no finite numbers": broken(processes__0__shares={"data": float("nan")}),
    "no shares": broken(processes__0__shares={}),
    "more threads than any": broken(processes__0__threads=2**61 - 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_diagnosis_is_refused(read, name):
    with pytest.raises(CpulaunchError, match="no diagnosis can be read"):
        read(copy.deepcopy(WRONG[name]))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CpulaunchError, match="it is no text"):
        read_document(str(tmp_path / "a.json"))
    with pytest.raises(CpulaunchError, match="No such file"):
        read_document(str(tmp_path / "b.json"))
