"""The page of a search for settings: what it says and shows, for ordinary searches and for hostile ones."""

import re
import shlex

import pytest

from tests.html import hostile
from tests.html.reader import Reader


def text_of(**changes):
    return Reader(hostile.tune_document(hostile.search() | changes)).text


@pytest.mark.parametrize("text", hostile.ATTACKS, ids=range(len(hostile.ATTACKS)))
def test_text_of_others_stays_text(text):
    page = hostile.tune_document(hostile.search(text))
    seen, expected = Reader(page), Reader(hostile.tune_document(hostile.search()))
    assert seen.elements == expected.elements
    assert [name for name, _ in seen.attributes] == [name for name, _ in expected.attributes]
    assert all(each.isprintable() or each == "\n" for each in page)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 1e308, 5e-324, 0.0, 10**400])
def test_every_place_is_inside_its_chart(number):
    page = hostile.tune_document(hostile.search(number=number))
    places = [float(each) for each in re.findall(r'(?:[:"])(-?[0-9.]+|nan|inf)%', page)]
    assert len(places) > 10
    assert all(0 <= each <= 100 for each in places)


@pytest.mark.parametrize("trials", [0, 1, 3, 1000])
def test_any_number_of_trials(trials):
    page = hostile.tune_document(hostile.search(trials=trials))
    assert ("<figcaption>Trials" in page) is (trials > 0)
    assert page.count('class="lost"') == min(trials // 4, trials) + (trials > 3)


def test_a_search_that_was_interrupted_at_once():
    nothing = {
        "metric": None,
        "outputs": [],
        "reference": None,
        "baseline": [],
        "trials": [],
        "importance": {},
        "final": {"default": [], "finalists": []},
        "winner": None,
        "default_plan": None,
        "ended": "interrupted",
    }
    text = text_of(**nothing, verdict="interrupted before anything was found")
    assert "Interrupted before anything was found." in text
    assert "Outputs were not compared" in text
    assert not any(each in text for each in ("What to use", "Final round", "Failed trials", "Cores"))


@pytest.mark.parametrize(("confirmed", "tone"), [(True, "good"), (False, "neutral")])
def test_only_what_the_final_round_showed_is_good_news(confirmed, tone):
    search = hostile.search()
    search["winner"]["confirmed"] = confirmed
    page = hostile.tune_document(search)
    assert f'<p class="verdict {tone}">' in page
    assert ("not confirmed" in Reader(page).text) is not confirmed
    assert page.count('"fill best"') == 2 * confirmed  # The finalists with the winner's settings.


def test_the_best_so_far_is_that_of_whole_trials():
    search = hostile.search(trials=0)
    ratios = [("measured", 1.0), ("cut short", 1.9), ("measured", 1.5), ("failed", None), ("measured", 1.2)]
    search["trials"] = [
        {**hostile.search()["trials"][0], "number": n, "state": state, "ratio": ratio, "failure": "it crashed"}
        for n, (state, ratio) in enumerate(ratios)
    ]
    from cpulaunch.charts.tune_charts import trials_chart

    chart = trials_chart(search)
    assert [point.y for point in chart.series[1].points] == [1.0, 1.0, 1.5, 1.5]
    assert [point.marked for point in chart.series[0].points] == [False, True, False, False]
    assert [each.x for each in chart.lost] == [4.0]


def test_what_is_used_next():
    search = hostile.search()
    command = ["cpulaunch", "--profile", "infer-tuned", "my infer.py", "it's"]
    search["winner"] |= {"command": command, "profile": "/p/x.toml"}
    text = Reader(hostile.tune_document(search)).text
    assert f"Use them: {shlex.join(command)}" in text
    assert "/p/x.toml" in text
