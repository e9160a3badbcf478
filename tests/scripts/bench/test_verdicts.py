"""Counting verdicts on recorded and live figures."""

import random
from collections import Counter

import pytest
from verdicts import any_verdict, live_verdicts, noise_of, share, simulated_verdicts


def test_a_verdict_at_any_look_counts() -> None:
    first = [1.0] * 14
    early = [2.0 + at / 100 for at in range(9)] + [0.1] * 5
    assert any_verdict(first, early, lower_is_better=False) == "better"
    assert any_verdict(first, early, lower_is_better=True) == "worse"
    assert any_verdict(first[:8], early[:8], lower_is_better=False) == "too few rounds"


def test_equal_sides_are_equal_and_a_planted_difference_is_found() -> None:
    generator = random.Random(1)
    record = [100 * (1 + generator.gauss(0, 0.02)) for _ in range(300)]
    equal = simulated_verdicts(record, 100, rounds=30, planted=0.0, generator=random.Random(2))
    planted = simulated_verdicts(record, 100, rounds=30, planted=0.05, generator=random.Random(2))
    assert share(equal, "better", "worse") <= 0.05
    assert share(planted, "better") >= 0.9


def test_live_figures_are_dealt_to_both_sides_in_turn() -> None:
    figures = iter(range(1, 100))
    verdicts, taken = live_verdicts(lambda: float(next(figures)), 2, rounds=3)
    assert taken == [float(each) for each in range(1, 13)]
    assert verdicts == Counter({"too few rounds": 2})


def test_noise_is_that_between_neighbours() -> None:
    assert noise_of([1.0, 1.1, 1.0, 1.1])["median_step"] == pytest.approx(0.1)
    assert noise_of([1.0, 1.1, 1.0, 1.1])["correlation"] < 0
