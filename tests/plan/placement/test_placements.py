"""The planner's table: machine and flags -> one line per worker."""

from pathlib import Path

import pytest

from tests.plan.machines import TORCH, lines, plan, replace
from tests.plan.shapes import SHAPES

BLOCKS = Path(__file__).with_name("placements.txt").read_text().split("\n== ")[1:]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.partition("\n")[0].replace(" --", "--") for block in BLOCKS])
def test_placement(block: str) -> None:
    head, *expected = block.strip().split("\n")
    shape, _, flags = head.partition(" ")
    made = plan(replace(SHAPES[shape], torch=TORCH), flags)
    assert [*lines(made), *(f"! {warning}" for warning in made.warnings)] == expected


def test_every_shape_is_in_the_table() -> None:
    assert {block.split()[0] for block in BLOCKS} == SHAPES.keys()


@pytest.mark.parametrize(
    ("shape", "flags", "mentioned"),
    [
        ("one-performance-core", "", True),
        ("one-performance-core", "--e-cores", False),
        ("one-performance-core", "--no-e-cores", False),
        ("one-performance-core", "--cpus 0-2", False),
        ("only-efficiency-cores", "", False),
        ("hybrid", "", False),
    ],
)
def test_the_pool_says_why_efficiency_cores_are_in_it(shape: str, flags: str, mentioned: bool) -> None:
    reason = next(note.reason for note in plan(SHAPES[shape], flags).notes if note.setting == "pool")
    assert ("efficiency cores (CPUs 1-4) too: one performance core alone is slower" in reason) is mentioned
