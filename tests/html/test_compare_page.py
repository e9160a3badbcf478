"""The page of a comparison: what it says and shows, for ordinary comparisons and for hostile ones."""

import copy
import re

import pytest

from tests.html import hostile
from tests.html.reader import Reader


def document(**changes):
    return hostile.compare_document(hostile.comparison() | changes)


@pytest.mark.parametrize("text", hostile.ATTACKS, ids=range(len(hostile.ATTACKS)))
def test_text_of_others_stays_text(text):
    page = hostile.compare_document(hostile.comparison(text))
    seen, expected = Reader(page), Reader(document())
    assert seen.elements == expected.elements
    assert [name for name, _ in seen.attributes] == [name for name, _ in expected.attributes]
    assert all(each.isprintable() or each == "\n" for each in page)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 1e308, 5e-324, 0.0, 10**400])
def test_every_place_is_inside_its_chart(number):
    comparison = hostile.comparison(number=1.5, rounds=8)
    comparison["seconds"] = 1.0
    for each in comparison["rounds"][::2]:
        each["samples"] = [{**sample, "value": number} for sample in each["samples"]]
    comparison["comparisons"][0] |= {"ratio": number, "low": number, "high": number}
    if not 0 < number < 1e300:
        comparison["sides"] = [{**side, "drift": None} for side in comparison["sides"]]
    page = hostile.compare_document(comparison)
    places = [float(each) for each in re.findall(r'(?:[:"])(-?[0-9.]+|nan|inf)%', page)]
    assert len(places) > 40
    assert all(0 <= each <= 100 for each in places)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 200])
@pytest.mark.parametrize("sides", [2, 3, 9])
def test_any_number_of_rounds_and_sides(sides, rounds):
    comparison = hostile.comparison(sides=sides, rounds=rounds)
    comparison["sides"] = [{**side, "label": f"side {number}"} for number, side in enumerate(comparison["sides"])]
    if not rounds:
        comparison |= {"comparisons": [], "metric": None, "ended": "failed"}
        comparison["sides"] = [{**each, "median": None, "spread": None, "drift": None} for each in comparison["sides"]]
    text = Reader(hostile.compare_document(comparison)).text
    assert all(f"side {number}" in text for number in range(sides))
    assert ("No verdict: no round was completed." in text) is (rounds == 0)


def test_a_page_of_workers_that_never_started():
    comparison = hostile.comparison()
    comparison["sides"] = [{**side, "plain": True, "plan": None, "workers": []} for side in comparison["sides"]]
    assert "Inside torch" not in Reader(hostile.compare_document(comparison)).text


def verdicts(*pairs):
    found = hostile.comparison()
    for each, (verdict, ratio) in zip(found["comparisons"], pairs, strict=True):
        each |= {"verdict": verdict, "ratio": ratio, "text": f"it is {verdict}"}
    return hostile.compare_document(found)


@pytest.mark.parametrize(
    ("pairs", "tone", "first"),
    [
        ([("better", 1.1), ("better", 1.5)], "good", "it is better."),
        ([("no difference", 1.9), ("worse", 0.5)], "bad", "it is worse."),
        ([("worse", 0.5), ("better", 1.1)], "good", "it is better."),
        ([("too few rounds", 3.0), ("no difference", 1.0)], "neutral", "it is too few rounds."),
    ],
)
def test_the_verdict_that_is_certain_comes_first(pairs, tone, first):
    page = verdicts(*pairs)
    assert f'<p class="verdict {tone}">{first}</p>' in page


def test_disturbed_launches_and_failures_are_marked():
    comparison = hostile.comparison(rounds=4)
    for number, each in enumerate(comparison["rounds"]):
        each["samples"] = [{**copy.copy(s), "disturbed": ["noise"] if number == 2 else []} for s in each["samples"]]
    page = hostile.compare_document(comparison)
    text = Reader(page).text
    assert "1 of 4 rounds had a disturbed launch." in text
    assert page.count(", 3: 1.5 (noise)") == 3
    assert page.count('class="lost"') == 2  # The cross, and its explanation.
    assert page.count(" marked") >= 3
    assert "drifts by +50.0%" in text


def test_a_trend_is_drawn_for_a_side_that_drifts_alone():
    comparison = hostile.comparison(sides=2, rounds=4)
    comparison["sides"][1]["drift"] = None
    assert hostile.compare_document(comparison).count('class="trend s') == 1


def test_only_what_differs_is_in_the_differences():
    comparison = hostile.comparison()
    for number, side in enumerate(comparison["sides"]):
        notes = [
            {"setting": "graph", "value": str(number), "origin": "cli", "reason": "asked for"},
            {"setting": "same", "value": "same", "origin": "cli", "reason": "same for all"},
            {"setting": "OMP_NUM_THREADS", "value": str(number), "origin": "default", "reason": "one per core"},
        ]
        env = {"OMP_NUM_THREADS": str(number) if number else None, "EQUAL": "1"}
        workers = [{**worker, "env": env} for worker in side["plan"]["workers"]]
        side["plan"] = {"notes": notes, "workers": workers, "warnings": []}
    comparison["sides"][0]["plain"] = True
    text = Reader(hostile.compare_document(comparison)).text
    assert "same for all" not in text
    assert all(each in text for each in ("asked for", "one per core", "EQUAL", "as it was"))


def test_sides_that_differ_in_nothing_have_no_differences():
    assert "What the sides differ in" not in Reader(document()).text


@pytest.mark.parametrize(
    ("metric", "share"),
    [
        ("GFLOP/s", "25%"),
        ("TFLOPS", "25000%"),
        ("speed (MFLOPs/s)", "0%"),
        ("GB/s", "250%"),
        ("GiB/s read", "268%"),
        ("gB/s", "250%"),
        ("Gb/s", None),
        ("gb/s", None),
        ("samples/s", None),
        ("GFLOP", None),
        ("MB/step", None),
    ],
)
def test_the_share_of_a_ceiling_needs_its_unit(metric, share):
    comparison = hostile.comparison(number=50.0)
    comparison["metric"]["name"] = metric
    text = Reader(hostile.compare_document(comparison)).text
    assert ("Shares of these rates" in text) is (share is not None)
    assert share is None or share in text
