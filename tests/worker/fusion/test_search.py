"""Which operations are left out, with compilers that fail at chosen operations."""

import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.fusion.search import ExhaustedError, TrialOutcome, search  # noqa: E402

pytestmark = pytest.mark.torch
GROUPS = [frozenset({2 * index, 2 * index + 1}) for index in range(20)]


def failing_at(*positions: int, limit: int = 1000) -> Callable[[frozenset[int]], str | None]:
    """A compiler that fails if it sees one of these operations, for so many attempts."""
    left = [limit]

    def attempt(left_out: frozenset[int]) -> str | None:
        if not left[0]:
            raise ExhaustedError("no more attempts")
        left[0] -= 1
        return "defect" if set(positions) - left_out else None

    return attempt


def test_nothing_is_left_out_of_a_graph_that_compiles() -> None:
    assert search(failing_at(), frozenset(), lambda: GROUPS) == TrialOutcome()


def test_only_the_groups_with_defects_are_left_out() -> None:
    generator = random.Random(5)
    for _ in range(50):
        positions = generator.sample(range(40), generator.randint(1, 6))
        expected = frozenset().union(*(group for group in GROUPS if group & set(positions)))
        assert search(failing_at(*positions), frozenset(), lambda: GROUPS).left_out == expected


def test_all_in_the_same_place_are_left_out_once_one_is_found_and_others_fail() -> None:
    attempts: list[frozenset[int]] = []

    def searched(*positions: int, kin: frozenset[int]) -> frozenset[int]:
        def attempt(left_out: frozenset[int]) -> str | None:
            attempts.append(left_out)
            return failing_at(*positions)(left_out)

        attempts.clear()
        return search(attempt, frozenset(), lambda: GROUPS, lambda group: group | kin).left_out

    even = frozenset(position for position in range(40) if position // 2 % 2 == 0)
    assert searched(4, 12, 20, 36, kin=even) == even
    assert len(attempts) < 10
    assert searched(4, kin=even) == {4, 5}  # Nothing else need be left out.
    assert searched(4, 7, 20, kin=even) == {4, 5, 6, 7, 20, 21} | even  # Something else fails, too.
    assert searched(4, 20, kin=frozenset(range(40))) == {4, 5, 20, 21}  # Otherwise nothing would be fused.


def test_what_is_known_stays_left_out() -> None:
    assert search(failing_at(8), frozenset({3}), lambda: GROUPS).left_out == {3, 8, 9}


def test_a_defect_outside_all_operations_refuses_the_graph() -> None:
    outcome = search(failing_at(99), frozenset(), lambda: GROUPS)
    assert (outcome.refusal, outcome.lasting) == ("defect", True)


@pytest.mark.parametrize(("limit", "expected"), [(1, None), (2, frozenset(range(40))), (4, frozenset(range(40)))])
def test_a_search_cut_short_uses_what_worked(limit: int, expected: frozenset[int] | None) -> None:
    outcome = search(failing_at(5, 30, limit=limit), frozenset(), lambda: GROUPS)
    if expected is None:
        assert (outcome.refusal, outcome.lasting) == ("no more attempts", False)
    else:
        assert outcome.left_out == expected


@pytest.mark.parametrize("lasting", [False, True])
def test_what_depends_on_the_moment_does_not_last(lasting: bool) -> None:
    attempts = iter(["defect", None])

    def attempt(left_out: frozenset[int]) -> str | None:
        for reason in attempts:
            return reason
        raise ExhaustedError("a limit", lasting=lasting)

    outcome = search(attempt, frozenset(), lambda: GROUPS)
    assert (outcome.left_out, outcome.lasting) == (frozenset(range(40)), lasting)
