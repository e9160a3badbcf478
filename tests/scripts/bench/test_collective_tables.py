"""The arithmetic and the words of the benches of collectives and of overlap, without running anything."""

import pytest
from collective_tables import bound, can_spin, largest_difference, table, verdict, why_not
from overlap_tables import LARGEST_BATCH, balanced_batch, own_cpus, shared_cpus, what_cpus_allow
from overlap_tables import table as overlap_table
from ranks import last_line

MEASURED = {
    "path": "memory",
    "reduce": {"4096": {"gloo": [2e-3, 4e-3], "ccl": [1e-3, 1e-3], "oneccl": [3e-3, 3e-3], "bare": [2e-3, 2e-3]}},
    "others": {"barrier": {"gloo": [2e-6, 2e-6], "ccl": [1e-6, 1e-6]}},
    "step": {"256": {"gloo": [2e-3, 2e-3], "ccl": [1e-3, 1e-3]}},
    "losses": {"256": {"ccl": {"steps": 7, "difference": 0.0}}},
}


def test_ways_are_compared_within_a_round_and_missing_ones_left_open() -> None:
    lines = table(2, MEASURED).splitlines()
    assert lines[1].split("  ")[0] == "all-reduce 4 KiB, us"
    assert "3.00 (2.00-4.00)" in lines[1]
    assert lines[1].endswith("0.50 (0.50-0.50)")
    assert lines[2].startswith("barrier, us")
    assert lines[2].split()[-3:] == ["-", "-", "-"]
    assert "memory path" in lines[4]
    assert lines[5] == "width 256, ccl: the losses of 7 steps are gloo's, bit for bit"


@pytest.mark.parametrize(
    ("losses", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
    ],
)
def test_losses_differ_relative_to_those_expected(
    losses: list[float], expected: list[float], difference: float
) -> None:
    assert largest_difference(losses, expected) == difference


def test_a_step_that_exchanges_nothing_bounds_the_others() -> None:
    said = bound(256, {"gloo": [4e-3, 9e-3, 6e-3], "none": [2e-3, 3e-3, 2e-3]})
    assert "exchanges nothing takes 2.00 (2.00-3.00) ms" in said
    assert "gloo's takes 3.00 (2.00-3.00) times as long" in said


def test_losses_within_rounding_are_said_to_differ() -> None:
    assert verdict("ccl", {"steps": 3, "difference": 1.25e-7}).endswith(
        "of 3 steps differ from gloo's by up to 1.2e-07 of them"
    )


@pytest.mark.parametrize(("size", "cpus", "can"), [(2, 2, True), (4, 2, False), (4, 8, True)])
def test_oneccl_needs_a_cpu_for_each_rank(size: int, cpus: int, can: bool) -> None:
    assert can_spin(size, cpus) is can
    assert f"{size} ranks on {cpus} CPUs" in why_not(size, cpus)


def test_what_torch_prints_before_a_result_is_left_out() -> None:
    assert last_line('[Gloo] Rank 0 is connected\n{"a": 1}\n') == '{"a": 1}'
    with pytest.raises(RuntimeError, match="nothing"):
        last_line(" \n")


@pytest.mark.parametrize(
    ("backward", "communication", "batch"),
    [
        ({8: 0.010, 64: 0.038}, 0.020, 28),
        ({8: 0.010, 64: 0.038}, 0.001, 1),
        ({8: 0.010, 64: 0.010}, 0.020, 64),
        ({8: 0.001, 64: 0.0011}, 9.0, LARGEST_BATCH),
    ],
)
def test_the_batch_makes_backward_as_long_as_communication(
    backward: dict[int, float], communication: float, batch: int
) -> None:
    assert balanced_batch(backward, communication) == batch


def test_communication_gets_cpus_only_where_all_ranks_can_have_one() -> None:
    assert shared_cpus([4, 5], 3) == [[4], [5], [4]]
    assert own_cpus([4, 5, 6], 2) is None
    assert own_cpus([4, 5, 6, 7], 2) == ([[4], [6]], [5, 7])


@pytest.mark.parametrize(
    ("cpus", "said"), [(1, "nothing can be hidden"), (2, "only waiting can be hidden"), (4, "can have a CPU for")]
)
def test_what_a_machine_allows_is_said(cpus: int, said: str) -> None:
    assert said in what_cpus_allow(cpus, 2)
    assert ("need 4 CPUs" in what_cpus_allow(cpus, 2)) is (cpus < 4)


def test_a_step_is_held_against_compute_and_communication_of_its_round() -> None:
    times = {"forward": [0.001], "compute": [0.003], "communication": [0.002], "step": [0.004]}
    line = overlap_table({"ccl": {"batch": 5, "times": times}}).splitlines()[1]
    assert line.split("  ")[0] == "ccl"
    assert line.endswith("0.80 (0.80-0.80)")
    assert line.count("2.00 (2.00-2.00)") == 2
    assert "1.00 (1.00-1.00)" in line


def test_a_batch_that_cannot_be_smaller_is_said() -> None:
    times = {"forward": [0.001], "compute": [0.003], "communication": [0.001], "step": [0.004]}
    said = overlap_table({"ccl": {"batch": 1, "times": times}}).splitlines()[-1]
    assert said == "ccl: backward takes no less than this, with a batch of one"
