"""The loop of a comparison on simulated machines: order, endings, failures; and what is printed of it."""

from dataclasses import replace

import pytest

from cpulaunch.measure.comparison import ComparisonLimits
from cpulaunch.measure.comparison_json import comparison_json
from cpulaunch.measure.comparison_text import budget_warning, comparison_text, progress_text
from cpulaunch.measure.samples import Disturbance, MetricChoice, Side
from cpulaunch.records.errors import UsageError
from tests.json_output import checked
from tests.measure.simulated import A, B, C, Machine, steady


def text_of(comparison, width=80, **limits):
    return comparison_text(comparison, ComparisonLimits(**limits), width=width, strong=str)


def test_the_first_launches_do_not_count_and_some_rounds_run_backwards():
    machine = Machine({"A": lambda n: 1.0 if n else 99.0, "B": lambda n: 2.0 if n else 1.0})
    found = machine.compare(rounds=3)
    assert "".join(machine.launched) == "AB" + "AB" + "BA" + "AB"
    assert found.values(0) == (1.0, 1.0, 1.0)
    assert [each.ratio for each in found.estimates] == [2.0]
    assert (found.ended, text_of(found).splitlines()[0]) == (
        "rounds",
        "no verdict: B was 2.00 times as fast as A in the median of 3 rounds; a verdict",
    )


def test_what_is_compared_is_not_also_reported():
    machine = Machine({"A": steady(1), "B": steady(2)})
    by_pattern, by_time = (
        text_of(machine.compare(choice=choice, rounds=1))
        for choice in (MetricChoice(pattern="items/s: ([0-9.]+)", lower_is_better=False), MetricChoice())
    )
    assert "compared: items/s, of which more is better\n" in by_pattern
    assert "compared: wall time, of which less is better; also reported: items/s\n" in by_time


def test_the_table_shows_the_median_of_each_side():
    found = Machine({"A": lambda n: 1.0, "B": lambda n: float(n)}).compare(rounds=4)
    rows = [line.split() for line in text_of(found).splitlines() if line[:2] in ("A ", "B ")]
    assert rows == [["A", "1", "0.0%", "1"], ["B", "2.5", "59.3%", "2.45"]]


class Reporting(Machine):
    def take(self, side, choice, limit_seconds):
        sample = super().take(side, choice, limit_seconds)
        return replace(sample, report={"workers": [len(self.launched)]}, checksums={"logits": [1]})


def test_only_the_first_and_the_last_launches_keep_their_reports():
    found = Reporting({"A": steady(1), "B": steady(2)}).compare(rounds=4)
    launches = [found.warm_up, *(each.samples for each in found.rounds)]
    kept = [[(sample.report is not None, bool(sample.checksums)) for sample in each] for each in launches]
    assert kept == [[(True, True)] * 2, *([(False, False)] * 2 for _ in range(3)), [(True, True)] * 2]


def test_it_stops_once_the_interval_is_narrow_enough():
    found = Machine({"A": steady(100), "B": steady(150)}).compare(until=0.05)
    assert (found.ended, len(found.rounds)) == ("precise", 9)
    assert text_of(found).startswith("B is faster than A: 1.50 times as fast, between 1.")


def test_it_runs_on_while_the_interval_is_wide():
    found = Machine({"A": steady(100, 0.2), "B": lambda n: 100 * (1 + 0.3 * (n % 3))}).compare(until=0.001, rounds=20)
    assert (found.ended, len(found.rounds)) == ("rounds", 20)


def test_equal_sides_show_no_difference():
    found = Machine({"A": steady(100), "B": lambda n: steady(100)(n + 2)}).compare()
    start = "no difference that this machine can show: B is 1.00 times as fast as A, between 0.99 and 1.01"
    assert text_of(found, width=200).startswith(start)


def test_a_slower_side_is_said_to_be_slower():
    choice = MetricChoice()
    found = Machine({"A": steady(2.0), "B": steady(4.0)}).compare(choice=choice)
    assert text_of(found).startswith("B is slower than A: 0.50 times as fast")


def test_no_round_begins_that_would_exceed_the_budget():
    machine = Machine({"A": steady(1), "B": steady(2)}, seconds=10)
    found = machine.compare(budget_seconds=105)
    assert (found.ended, len(found.rounds), machine.now) == ("budget", 4, 100)
    assert "another round would exceed --budget 105" in text_of(found, budget_seconds=105)


@pytest.mark.parametrize(("budget", "warns"), [(200, False), (199, True)])
def test_a_budget_in_which_no_verdict_is_possible_is_told_before_the_first_round(budget, warns):
    """The first launches take 20 seconds, and each of nine rounds does."""
    told = []
    limits = ComparisonLimits(budget_seconds=budget, until=0)

    def listen(now):
        if text := budget_warning(now, limits):
            told.append((len(now.rounds), text))

    found = Machine({"A": steady(1.0), "B": steady(1.3)}).compare(progress=listen, budget_seconds=budget, until=0)
    needs = "a verdict needs 9 rounds, for which --budget 199 may not suffice: give --budget 220"
    assert told[:1] == ([(0, f"warning: {needs}")] if warns else [])
    said = "8 rounds in 180 s; ended because another round would exceed --budget 199; for a verdict give --budget 220"
    assert (said in text_of(found, width=200, budget_seconds=budget)) == warns


class Uneven(Machine):
    """One launch, of this number, takes nine times as long as others."""

    def __init__(self, long):
        super().__init__({"A": lambda n: 1.0 + n / 1000, "B": lambda n: 2.0 + n / 1000})
        self.long = long

    def take(self, *given):
        self.seconds = 90.0 if len(self.launched) == self.long else 10.0
        return super().take(*given)


@pytest.mark.parametrize(("budget", "long", "rounds"), [(300, 4, 6), (30, None, 0), (120, None, 5)])
def test_a_budget_that_is_advised_suffices(budget, long, rounds):
    found = Uneven(long).compare(budget_seconds=budget, until=0)
    assert (found.ended, len(found.rounds)) == ("budget", rounds)
    text = text_of(found, width=200, budget_seconds=budget)
    advised = int(text.partition("for a verdict give --budget ")[2].split()[0])
    assert advised > budget
    assert len(Uneven(long).compare(budget_seconds=advised, until=0).rounds) >= 9


def test_few_rounds_are_not_told_to_need_a_budget():
    limits = ComparisonLimits(budget_seconds=150, rounds=5)
    told = []
    Machine({"A": steady(1.0), "B": steady(1.3)}).compare(
        progress=lambda now: told.append(budget_warning(now, limits)), budget_seconds=150, rounds=5
    )
    assert set(told) == {""}
    found = Machine({"A": steady(1.0), "B": steady(1.3)}, seconds=30.0).compare(budget_seconds=100, rounds=3)
    assert "for a verdict" not in text_of(found, width=200, budget_seconds=100, rounds=3)


def test_time_limits_are_the_budget_first_and_then_follow_the_launches():
    machine = Machine({"A": steady(1), "B": steady(2)}, seconds=10)
    machine.compare(rounds=1, budget_seconds=1000)
    assert machine.limits == [1000, 990, 160, 160]


def test_a_side_that_fails_at_first_ends_the_comparison():
    machine = Machine({"A": steady(1), "B": lambda n: "it exited with code 3: no such option"})
    found = machine.compare()
    assert (found.ended, found.rounds) == ("failed", ())
    assert "B failed in its first launch: it exited with code 3: no such option" in text_of(found)
    assert "no verdict" in text_of(found)


def test_one_later_failure_costs_its_round_and_a_second_one_ends_it():
    once = Machine({"A": steady(1), "B": lambda n: "killed" if n == 3 else 2.0}).compare(rounds=12)
    assert (once.ended, len(once.rounds), len(once.failures)) == ("precise", 9, 1)
    assert "B failed in round 3, which does not count: killed" in text_of(once)
    twice = Machine({"A": steady(1), "B": lambda n: "killed" if n in (3, 5) else 2.0}).compare(rounds=12)
    assert (twice.ended, len(twice.rounds), len(twice.failures)) == ("failed", 3, 2)


@pytest.mark.parametrize(("failing", "said"), [("B", {"B"}), ("A", {"B", "C"})])
def test_what_fails_again_and_again_is_not_better_however_fast_the_rest_was(failing, said):
    results = {"A": steady(1), "B": steady(2), "C": steady(3)}
    right = results[failing]
    results[failing] = lambda n: "killed" if n in (12, 14) else right(n)
    found = Machine(results).compare(A, B, C, until=0)
    data = comparison_json(found, ComparisonLimits(), program=("a.py",), version="1", host="h")
    checked("compare", data)
    assert (found.ended, len(found.rounds)) == ("failed", 12)
    for each, label in zip(data["comparisons"], "BC", strict=True):
        assert (each["verdict"], each["text"].split()[0]) == (("failed", "no") if label in said else ("better", label))
    assert f"no verdict: {failing} failed in 2 launches; B was 2.00 times as fast as A" in text_of(found, width=200)


def test_after_an_interrupt_there_is_what_was_found():
    def value(number):
        if number == 11:
            raise KeyboardInterrupt
        return 2.0 + number / 1000

    found = Machine({"A": steady(1), "B": value}).compare(until=0)
    assert (found.ended, len(found.rounds)) == ("interrupted", 10)
    assert "B is faster than A" in text_of(found)
    early = Machine({"A": steady(1), "B": lambda n: value(11)}).compare()
    assert (early.ended, text_of(early).splitlines()[0]) == ("interrupted", "no verdict: no round was completed")


def test_more_sides_are_compared_to_the_first():
    found = Machine({"A": steady(1), "B": steady(2), "C": steady(3)}).compare(A, B, C)
    assert [round(each.ratio, 3) for each in found.estimates] == [2, 3]
    assert found.estimates[0].rounds == 10
    assert [line.partition(":")[0] for line in text_of(found).splitlines()[:2]] == [
        "B is faster than A",
        "C is faster than A",
    ]


def test_sides_with_different_metrics_are_an_error():
    machine = Machine({"A": steady(1), "B": steady(1)})
    take = machine.take
    machine.take = lambda side, choice, limit: _renamed(take(side, choice, limit), side)
    with pytest.raises(UsageError, match="no metric in common"):
        machine.compare()


def _renamed(sample, side):
    from cpulaunch.records.record import replace

    return replace(sample, metrics={f"{side.label}/s": 1.0})


def test_disturbances_and_drift_are_told():
    disturbance = Disturbance(other_cpus=1.5, steal=0.05)
    rising = lambda n: 100.0 * (1 + n / 40)  # noqa: E731
    machine = Machine({"A": rising, "B": rising}, disturbance=disturbance)
    text = text_of(machine.compare(until=0, rounds=20))  # no precision ends it
    assert "20 of 20 rounds disturbed: " in text
    assert "load of other processes (20)" in text
    assert "A drifted by +45.9%" in " ".join(text.split())


def test_context_switches_are_shown_by_side():
    machine = Machine({"A": steady(1), "B": steady(2)}, disturbance=Disturbance(involuntary_switches=25))
    shown = "involuntary context switches per second, in the median: A 2.5, B 2.5"
    assert shown in text_of(machine.compare(rounds=3), width=200)
    assert "context" not in text_of(Machine({"A": steady(1), "B": steady(2)}).compare(rounds=3))


def test_all_lines_fit_narrow_terminals_and_labels_are_escaped():
    long = Side(label="--graph onednn --instances 2 --env NAME=\x1b[31m" + "x" * 100)
    found = Machine({"A": steady(1), long.label: steady(2)}).compare(A, long)
    text = text_of(found, width=80)
    assert "\x1b" not in text
    assert all(
        len(line) <= 80 for line in text.splitlines() if line.startswith(("A", "-", "side")) and "is" not in line
    )


@pytest.mark.parametrize("metric", ["s", "examples that are seen per second"])
def test_the_table_fits_however_long_names_and_figures_are(metric):
    long = Side(label="--graph onednn --instances 2 --cores-per-instance 4 --weights int8")
    found = Machine({"A": steady(1e14), long.label: steady(2e14)}).compare(
        A, long, choice=MetricChoice(name=metric, lower_is_better=False)
    )
    rows = [
        line
        for line in text_of(found).splitlines()
        if line.startswith(("A  ", "side ", "--graph")) and "is" not in line
    ]
    assert len(rows) == 3
    assert all(len(row) <= 80 for row in rows)
    assert rows[1].split()[1] == "100000000000000"


def test_progress_tells_what_runs():
    shown = []
    limits = ComparisonLimits(rounds=12)
    machine = Machine({"A": steady(1), "B": steady(2)})
    machine.compare(rounds=12, progress=lambda now: shown.append(progress_text(now, limits)))
    assert shown[:3] == [
        "first launches, which do not count: A",
        "first launches, which do not count: B",
        "round 1 of at most 12: A",
    ]
    assert shown[4] == "round 2 of at most 12, so far 2.00: B"


@pytest.mark.parametrize("rounds", [1, 12])
def test_the_json_follows_its_schema(rounds):
    machine = Machine({"A": steady(1), "B": lambda n: "killed" if n == 2 else 2.0})
    found = machine.compare(rounds=rounds)
    data = comparison_json(found, ComparisonLimits(), program=("a.py",), version="1", host="h")
    checked("compare", data)
    assert data["metric"] == {"name": "items/s", "source": "program", "lower_is_better": False}
    assert len(data["rounds"]) == len(found.rounds)


def test_the_json_of_a_comparison_without_rounds_follows_its_schema():
    found = Machine({"A": lambda n: "killed", "B": steady(1)}).compare()
    data = comparison_json(found, ComparisonLimits(), program=("a.py",), version="1", host="h")
    checked("compare", data)
    assert (data["ended"], data["metric"], data["failures"][0]["round"]) == ("failed", None, 0)
