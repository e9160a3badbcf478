"""The statistics against known values, and against simulated machines: how often a verdict is false, or missed."""

import itertools
import math
import random

import pytest

from cpulaunch.measure.statistics import (
    Estimate,
    drift,
    estimate,
    fewest_rounds,
    launch_order,
    spread,
)


def test_chance_decides_the_order_of_a_round():
    orders = [[launch_order(number, 3, seed=seed) for number in range(120)] for seed in range(20)]
    assert {order for each in orders for order in each} == set(itertools.permutations(range(3)))
    assert all(40 <= sum(order.index(0) < order.index(2) for order in each) <= 80 for each in orders)
    assert {launch_order(number, 2, seed=3) for number in range(20)} == {(0, 1), (1, 0)}
    assert len(set(map(tuple, orders))) == 20
    assert orders[3] == [launch_order(number, 3, seed=3) for number in range(120)]


def test_the_fewest_rounds_are_those_in_which_equal_signs_are_no_chance():
    for sides, error in ((2, 0.004), (3, 0.002), (5, 0.001)):
        rounds = fewest_rounds(sides)
        assert 2 / 2**rounds <= error < 2 / 2 ** (rounds - 1)


def test_a_better_side_is_better_in_rates_and_in_times():
    rates = estimate([100.0] * 10, [150.0] * 10, lower_is_better=False)
    times = estimate([3.0] * 10, [2.0] * 10, lower_is_better=True)
    for found in (rates, times):
        assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
        assert (found.verdict, found.precision) == ("better", pytest.approx(0))
    assert estimate([2.0] * 10, [3.0] * 10, lower_is_better=True).verdict == "worse"


def test_too_few_rounds_have_a_ratio_and_no_interval():
    found = estimate([1.0] * 8, [2.0] * 8, lower_is_better=False)
    assert (found.ratio, found.low, found.verdict, found.precision) == (2.0, None, "too few rounds", math.inf)


def brute_interval(values, error):
    """The interval by trying every assignment of signs: the shifts of which at least `error` is as extreme."""
    count = len(values)
    sums = [sum(itertools.compress(range(1, count + 1), signs)) for signs in itertools.product((0, 1), repeat=count)]
    chances = {each: sum(other <= each for other in sums) / len(sums) for each in set(sums)}
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    kept = []
    for left, right in itertools.pairwise(means):
        ordered = sorted((value - (left + right) / 2 for value in values), key=abs)
        below = sum(rank for rank, value in enumerate(ordered, 1) if value < 0)
        if min(chances[below], chances[count * (count + 1) // 2 - below]) > error / 2:
            kept += [left, right]
    return kept[0], kept[-1]


@pytest.mark.parametrize("count", [9, 11, 12])
def test_the_interval_contains_the_one_by_all_assignments_of_signs(count):
    generator = random.Random(count)
    logs = sorted(generator.gauss(0.1, 0.05) for _ in range(count))
    found = estimate([1.0] * count, [math.exp(each) for each in logs], lower_is_better=False)
    low, high = (math.exp(each) for each in brute_interval(logs, 0.004))
    assert found.low <= low * (1 + 1e-9)
    assert found.high >= high * (1 - 1e-9)
    assert found.low >= math.exp(logs[0]) * (1 - 1e-9)
    assert found.high <= math.exp(logs[-1]) * (1 + 1e-9)


def test_the_normal_approximation_continues_the_exact_interval():
    generator = random.Random(5)
    values = [math.exp(generator.gauss(0.0, 0.05)) for _ in range(62)]
    exact = estimate([1.0] * 60, values[:60], lower_is_better=False)
    close = estimate([1.0] * 62, values, lower_is_better=False)
    assert close.precision == pytest.approx(exact.precision, rel=0.15)


def noise(generator, count, *, sigma, correlation=0.6, outliers=0.08, trend=0.1):
    """Durations of launches one after the other: autocorrelated, with outliers of up to +60 %, and a trend."""
    state, found = 0.0, []
    for at in range(count):
        state = correlation * state + math.sqrt(1 - correlation**2) * generator.gauss(0, sigma)
        outlier = generator.random() < outliers and generator.expovariate(1 / 0.15)
        found.append(math.exp(state + min(float(outlier), 0.5) + trend * at / count + 0.3 * generator.gauss(0, sigma)))
    return found


def returning(generator, count, *, period, share=0.1):
    """Durations of launches beside something that comes back, and makes one launch of a period longer by a share."""
    first = generator.randrange(period)
    return [math.exp(generator.gauss(0, 0.01) + share * (at % period == first)) for at in range(count)]


def peeked_verdict(generator, *, planted, rounds=40, count=2, durations=noise, **machine):
    """The first verdict but "no difference" after any round; a side's figures are in the order of the launches."""
    times = durations(generator, count * rounds, **machine)
    seed = generator.randrange(1 << 32)
    sides = [[] for _ in range(count)]
    for number in range(rounds):
        for place, side in enumerate(launch_order(number, count, seed=seed)):
            sides[side].append(times[count * number + place] / (1 + planted * side))
        for other in sides[1:]:
            found = estimate(sides[0], other, lower_is_better=True, sides=count).verdict
            if found in ("better", "worse"):
                return found
    return "no difference"


@pytest.mark.parametrize("machine", [{}, {"trend": 0.5}, {"correlation": 0.95}, {"outliers": 0.3}], ids=str)
def test_equal_sides_get_few_false_verdicts_though_each_round_is_looked_at(machine):
    verdicts = [peeked_verdict(random.Random(seed), planted=0, sigma=0.03, **machine) for seed in range(200)]
    assert sum(verdict != "no difference" for verdict in verdicts) <= 10


@pytest.mark.parametrize(("count", "period"), [(2, 2), (2, 3), (2, 4), (2, 5), (2, 8), (3, 3), (3, 6), (4, 4)])
def test_what_comes_back_at_regular_times_favours_no_side(count, period):
    machine = {"count": count, "rounds": 80 // count, "durations": returning, "period": period}
    verdicts = [peeked_verdict(random.Random(seed), planted=0, **machine) for seed in range(200)]
    assert sum(verdict != "no difference" for verdict in verdicts) <= 10


def test_a_planted_difference_of_five_percent_is_found():
    verdicts = [peeked_verdict(random.Random(seed), planted=0.05, sigma=0.03) for seed in range(100)]
    assert verdicts.count("better") >= 90
    assert verdicts.count("worse") == 0


def test_the_final_interval_holds_the_true_ratio():
    missed = 0
    for seed in range(200):
        times = noise(random.Random(seed), 48, sigma=0.05)
        first = [times[2 * n + n % 2] for n in range(24)]
        other = [times[2 * n + 1 - n % 2] / 1.2 for n in range(24)]
        found = estimate(first, other, lower_is_better=True)
        missed += not found.low <= 1.2 <= found.high
    assert missed <= 4


def test_more_sides_widen_the_interval():
    generator = random.Random(3)
    values = [generator.gauss(1.0, 0.02) for _ in range(20)]
    two, five = (estimate([1.0] * 20, values, lower_is_better=False, sides=sides) for sides in (2, 5))
    assert five.precision > two.precision


def test_drift_is_told_where_there_is_a_trend():
    generator = random.Random(2)
    steady = [1.0 + generator.gauss(0, 0.02) for _ in range(20)]
    rising = [value * (1 + 0.2 * at / 19) for at, value in enumerate(steady)]
    assert drift(steady) is None
    assert drift(rising) == pytest.approx(0.2, abs=0.05)
    assert drift([1.0, 2.0]) is None


def test_spread_ignores_an_outlier():
    assert spread([1.0, 1.01, 0.99, 1.0, 5.0]) == pytest.approx(0.0148, abs=1e-4)


@pytest.mark.parametrize(("low", "high", "precision"), [(0.99, 1.01, 0.01), (0.99, 1.04, 0.04), (0.9, 1.0, 0.1)])
def test_the_precision_is_that_of_the_farther_end(low, high, precision):
    assert Estimate(ratio=1.0, low=low, high=high, rounds=9).precision == pytest.approx(precision)


def test_an_estimate_is_better_only_if_its_whole_interval_is():
    bounds = {(1.01, 1.1): "better", (0.9, 0.99): "worse", (0.99, 1.01): "no difference"}
    for (low, high), verdict in bounds.items():
        assert Estimate(ratio=1.0, low=low, high=high, rounds=9).verdict == verdict
