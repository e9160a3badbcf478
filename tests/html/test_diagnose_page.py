"""The page of a diagnosis: what it says and shows, for ordinary programs and for hostile ones."""

import re

import pytest

from cpulaunch.html.diagnose_page import PARTS, diagnose_page
from cpulaunch.measure.diagnosis.advice import ADVICE
from cpulaunch.measure.diagnosis.diagnosis import diagnosis_of
from cpulaunch.measure.diagnosis.diagnosis_json import diagnosis_json
from cpulaunch.measure.diagnosis.diagnosis_text import LABELS
from cpulaunch.measure.diagnosis.rates import Ceilings
from tests.html import hostile
from tests.html.reader import Reader
from tests.measure.diagnosis.given import figures, window
from tests.measure.diagnosis.test_bottlenecks import CASES, MACHINE, rank


@pytest.mark.parametrize("text", hostile.ATTACKS, ids=range(len(hostile.ATTACKS)))
def test_text_of_others_stays_text(text):
    page = hostile.diagnose_document(hostile.diagnosis(text))
    seen, expected = Reader(page), Reader(hostile.diagnose_document(hostile.diagnosis()))
    assert seen.elements == expected.elements
    assert [name for name, _ in seen.attributes] == [name for name, _ in expected.attributes]
    assert all(each.isprintable() or each == "\n" for each in page)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 1e308, 5e-324, 0.0])
def test_every_place_is_inside_its_chart(number):
    found = hostile.diagnosis(number=number)
    found["processes"][0]["shares"] = {"data": number, "products": 0.3}
    places = [float(each) for each in re.findall(r'(?:[:"])(-?[0-9.]+|nan|inf)%', hostile.diagnose_document(found))]
    assert len(places) >= 3
    assert all(0 <= each <= 100 for each in places)


def written(*processes, ceilings=None):
    """The text of the page of a diagnosis as the command makes it."""
    found = diagnosis_of(processes, {}, MACHINE, ceilings or Ceilings())
    data = diagnosis_json(found, program=("train.py",), version="1", host="here")
    return diagnose_page(data, machine="a machine", labels=LABELS)


@pytest.mark.parametrize("kind", CASES)
def test_each_bottleneck_has_its_page(kind):
    page = written(figures(**CASES[kind]))
    text = Reader(page).text
    assert f"First bottleneck: {ADVICE[kind].name}, " in text
    assert "What to do about it" in text
    assert "times as fast." in text
    assert "Ranks" not in text
    assert ("fill best" in page) is (kind in PARTS)


def test_every_part_that_is_marked_is_one_of_a_step():
    assert set(PARTS) <= set(ADVICE)
    assert set(PARTS.values()) <= set(LABELS)


def test_a_tuned_program_is_good_news():
    seen = window(0.1, kinds={"products": 0.1}, flops={"products": 8e9}, timed={"products": 0.1})
    page = written(figures(window=seen), ceilings=Ceilings(products={"fp32": 100.0}))
    text = Reader(page).text
    assert '<p class="verdict good">Nothing stands out: 100% of a step' in page
    assert "What to do about it" not in text
    assert "80 GFLOP/s" in text


def test_what_is_not_known_is_no_good_news():
    assert '<p class="verdict neutral">Not known: ' in written(figures(window=None))


def test_ranks_are_shown_beside_one_another():
    page = written(rank(0, own=0.01, waits=0.09), rank(1, own=0.095, waits=0.005))
    text = Reader(page).text
    assert "First bottleneck: straggler" in text
    assert "Time of a step without waiting for other ranks, ms" in text
    assert all(f"rank {number}" in text for number in (0, 1))


@pytest.mark.parametrize(("part", "calls"), [(1.0, "4"), (0.5, "8")])
def test_an_operation_takes_no_more_than_all_of_what_the_profiler_saw(part, calls):
    """The step under the profiler took twice as long as others: of those, its operation would take 160 %."""
    seen = window(0.2, kinds={"products": 0.2}, part=part, operations=[["aten::mm", 4, 0.16]])
    text = Reader(written(figures(window=seen, profiled_seconds=0.2 / part))).text
    assert "Of a step under the profiler" in text
    assert f"aten::mm{calls}{160 / part:.0f} ms80.0%" in text


def test_second_bottleneck_remarks_and_operations_are_there():
    slow = window(0.04, kinds={"products": 0.008}, tiny={"seconds": 0.032}, calls={"tiny": 900, "all": 1000})
    found = figures(window=slow, sums={"data_seconds": 0.6, "data_cpu": 0.6}, loader_workers=0, steps=3)
    text = Reader(written(found)).text
    assert "Second: tiny operations, " in text
    assert "aten::mm" in text
    assert "there were few steps" in text
