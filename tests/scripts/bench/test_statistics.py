"""The arithmetic of the benches, without running anything."""

import argparse
import math
import random
from pathlib import Path

import pytest
from arguments import at_least_one, comma_separated
from baselines import Baseline, format_errors, format_shares, shares
from interleave import (
    Spread,
    geometric_mean,
    measure_rounds,
    median_interval,
    paired_differences,
    paired_ratios,
    rotated,
    spread,
)
from rates import fastest, format_samples, parse_figures, parse_rates, summarise
from report import format_table

SAMPLES = {
    "bert": {"python": [10.0, 20.0, 10.0], "cpulaunch": [20.0, 40.0, 30.0]},
    "mlp": {"python": [100.0, 100.0, 100.0], "cpulaunch": [800.0, 700.0, 900.0]},
}


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, smallest=1.0, largest=3.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_geometric_mean_needs_positive_ratios() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])


def test_samples_are_compared_within_their_round() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert paired_differences([2.0, 9.0], [1.0, 3.0]) == [1.0, 6.0]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 2.0])


def test_every_round_measures_each_variant_once_and_starts_at_another() -> None:
    order: list[str] = []

    def measure(variant: str) -> float:
        order.append(variant)
        return float(len(order))

    samples = measure_rounds(["a", "b", "c"], measure, rounds=2)
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert samples == {"a": [1.0, 6.0], "b": [2.0, 4.0], "c": [3.0, 5.0]}
    assert list(rotated("ab", 3)) == ["b", "a"]


@pytest.mark.parametrize(
    ("output", "rates"),
    [
        ("bert: 12.34 samples/s\n", [12.34]),
        ("[0] bert: 1.50 samples/s\n[1] bert: 2.50 samples/s\n", [1.5, 2.5]),
        ("progress bert: 3.00 samples/s and more\nresnet50: 4.00 samples/s", [4.0]),
        ("no rate\n", []),
    ],
)
def test_rates_are_found_after_any_prefix(output: str, rates: list[float]) -> None:
    assert parse_rates(output) == rates


def test_summary_takes_ratios_per_round_and_means_over_models() -> None:
    summary = summarise(SAMPLES)
    assert summary["ratios"] == {
        "python": {"bert": {"python": 1.0, "cpulaunch": 2.0}, "mlp": {"python": 1.0, "cpulaunch": 8.0}}
    }
    means = summary["geometric_means"]
    assert isinstance(means, dict)
    assert means["python"]["cpulaunch"] == pytest.approx(4.0)


def test_table_shows_median_range_and_mean() -> None:
    table = format_samples(SAMPLES)
    assert "30.0 (20.0-40.0)" in table
    assert table.splitlines()[-1].split() == ["cpulaunch", "2.00", "8.00", "4.00"]


def test_figures_are_selected_by_their_unit() -> None:
    output = "[1] bert: 1.2e-03 largest error\nbert: 2.00 samples/s\nmlp: nan largest error\n"
    (bert, mlp) = parse_figures(output, "largest error")
    assert bert == ("bert", 0.0012)
    assert mlp[1] != mlp[1]


COMPILED = {
    "bert": {"inductor": [5.0, 8.0], "zentorch": [6.0, 4.0], "inductor-bf16": [9.0, 9.0], "cpulaunch": [12.0, 18.0]},
    "mlp": {"python": [4.0, 4.0], "cpulaunch": [8.0, 8.0]},
}


def test_the_fastest_is_chosen_for_each_round() -> None:
    assert fastest(COMPILED["bert"], ("inductor", "zentorch", "absent")) == [6.0, 8.0]
    assert fastest(COMPILED["mlp"], ("inductor", "zentorch")) == []


def test_ratios_to_the_best_of_several_peers_are_per_precision() -> None:
    ratios = summarise(COMPILED)["ratios"]
    assert isinstance(ratios, dict)
    assert ratios["the best of inductor and zentorch, fp32"]["bert"]["cpulaunch"] == pytest.approx((2.0 + 2.25) / 2)
    assert ratios["the best of inductor and zentorch, fp32 or bf16"]["bert"]["cpulaunch"] == pytest.approx(5 / 3)
    assert set(ratios) == {"python", *(name for name in ratios if name.startswith("the best of inductor"))}


def test_a_missing_result_leaves_an_empty_cell_and_is_noted_with_the_mean() -> None:
    table = format_samples({"bert": SAMPLES["bert"], "mlp": {"python": [100.0, 100.0, 100.0]}})
    assert table.splitlines()[2].split()[-1] == "-"
    assert table.splitlines()[-1] == "cpulaunch        2.00     -   2.00 (1 of 2)"


BASELINES = {"bert": Baseline(file=Path("bert.pt"), rms=0.997, gflop=10.0)}


def test_share_is_of_the_ceiling_in_the_precision_of_the_peer() -> None:
    samples = {"bert": {"python": [10.0], "cpulaunch-bf16": [40.0, 60.0, 50.0]}}
    shared = shares(samples, BASELINES, {"fp32": 200.0, "bf16": 1000.0})
    assert shared == {"bert": {"python": 0.5, "cpulaunch-bf16": 0.5}}
    assert "fp32 200 GFLOP/s, bf16 1,000 GFLOP/s" in format_shares(shared, {"fp32": 200.0, "bf16": 1000.0})


def test_errors_are_shown_beside_the_size_of_the_reference() -> None:
    table = format_errors({"bert": {"cpulaunch-bf16": 0.0123}}, BASELINES)
    assert "bert (rms 1)" in table
    assert "1.2e-02" in table


def test_table_columns_are_aligned() -> None:
    assert format_table(["what", "ms"], [["a", "1"], ["longer", "20"]]) == "what    ms\na        1\nlonger  20"


def test_lists_and_counts_are_checked() -> None:
    assert comma_separated(["a", "b"])("b,a") == ("b", "a")
    with pytest.raises(argparse.ArgumentTypeError, match=r"unknown: c \(known: a, b\)"):
        comma_separated(["a", "b"])("a,c")
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1: 0"):
        at_least_one("0")


def test_the_interval_of_a_median_holds_it_in_95_of_100_cases() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(400):
        found = median_interval([rng.gauss(1.0, 0.2) for _ in range(40)])
        hits += found.smallest <= 1.0 <= found.largest
    assert 372 <= hits <= 396


@pytest.mark.parametrize("count", [6, 7, 8, 11, 20, 40, 100, 101])
def test_the_interval_of_a_median_is_the_shortest_of_its_confidence(count: int) -> None:
    found = median_interval(list(range(count)))
    below = int(found.smallest)
    assert found.largest == count - 1 - below
    outside = [2 * sum(math.comb(count, each) for each in range(left_out + 1)) for left_out in (below, below + 1)]
    assert outside[0] <= 0.05 * 2**count < outside[1]


def test_few_samples_have_their_range_as_interval() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == Spread(median=2.0, smallest=1.0, largest=3.0)
