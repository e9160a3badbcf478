"""The table of GPU machines: machine, flags, variables -> one line per rank, from its files to its plan."""

from functools import cache
from pathlib import Path

import pytest

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from tests.plan.gpus.machines import SHAPES
from tests.plan.machines import plan
from tests.roots import host_of

BLOCKS = Path(__file__).with_name("placements.txt").read_text().split("\n== ")[1:]
SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@cache
def machine(shape: str) -> Host:
    """The machine as a launch reads it."""
    return host_of(SHAPES[shape], detail="launch")


def lines(made: LaunchPlan) -> list[str]:
    """One line per rank: its GPU, CPUs, memory and threads, and the variable that shows it one device."""
    return [
        f"{w.rank}: {'cpu' if w.gpu is None else f'gpu {w.gpu}'} {format_cpulist(w.cpus)} "
        f"{w.mempolicy}:{format_cpulist(w.numa_nodes)} t{w.threads}"
        + "".join(f" {name}={value}" for name, value in w.env if name in SHOWN)
        for w in made.workers
    ]


def planned(head: str) -> list[str]:
    """The plan for a line of the table, or the first line of the error."""
    launch, _, variables = head.partition(" | ")
    shape, _, flags = launch.partition(" ")
    environ = dict(each.split("=", 1) for each in variables.split())
    try:
        made = plan(machine(shape), flags, environ=environ)
    except UsageError as error:
        return [f"error: {error}".splitlines()[0]]
    return [*lines(made), *(f"! {warning}" for warning in made.warnings)]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.partition("\n")[0].replace(" --", "--") for block in BLOCKS])
def test_ranks_are_placed_next_to_their_gpus(block: str) -> None:
    head, *expected = block.strip().split("\n")
    assert planned(head) == expected


def test_every_machine_is_in_the_table() -> None:
    assert {block.split()[0] for block in BLOCKS} == SHAPES.keys()
