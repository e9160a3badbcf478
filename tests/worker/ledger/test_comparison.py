"""Two states compared one after the other: pure decisions, driven by made-up timings."""

import pytest

from cpulaunch.worker.ledger.comparison import MAX_CALLS, NEEDED, Comparison
from cpulaunch.worker.ledger.samples import WARM_UP


def steps(comparison: Comparison, first: float, second: float, number: int = 100) -> list[tuple[int, str]]:
    """The steps of a comparison, each with the number of durations so far."""
    found = []
    for count in range(1, number):
        step = comparison.add(second if comparison.is_second else first)
        if step is not None:
            found.append((count, step))
        if step in ("keep", "return"):
            break
    return found


@pytest.mark.parametrize(("second", "end"), [(0.5, "keep"), (0.99, "return"), (1.0, "return"), (1.2, "return")])
def test_the_second_state_stays_only_if_it_is_faster(second: float, end: str) -> None:
    calls = WARM_UP + NEEDED
    assert steps(Comparison(), 1.0, second) == [(calls, "change"), (2 * calls, end)]


def test_a_hopeless_state_is_left_early() -> None:
    assert steps(Comparison(), 1.0, 5.0)[-1] == (WARM_UP + NEEDED + WARM_UP + 1, "return")


def test_a_sample_is_the_mean_of_a_block() -> None:
    comparison = Comparison(block=6)
    found = steps(comparison, 1.0, 0.5)
    assert found == [(6 * (WARM_UP + NEEDED), "change"), (12 * (WARM_UP + NEEDED), "keep")]
    assert comparison.estimates() == (1.0, 0.5)


def test_steps_that_take_long_are_their_own_blocks_and_a_slower_state_is_left_after_one() -> None:
    found = steps(Comparison(block=6), 30.0, 36.0)
    assert found == [(WARM_UP + NEEDED, "change"), (WARM_UP + NEEDED + 1, "return")]


def test_calls_that_cannot_be_compared_end_it() -> None:
    comparison = Comparison()
    assert [comparison.pass_by() for _ in range(MAX_CALLS + 1)] == [None] * MAX_CALLS + ["return"]
