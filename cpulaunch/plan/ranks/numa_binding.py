"""torchrun's --numa-binding for ranks that compute on CPUs: dealt evenly over NUMA nodes or sockets.

As in torchrun, a rank gets all logical CPUs of its cores; its number of threads is its fair share of the cores.
Source: torch 2.13, torch/numa/binding.py, which does this for the NUMA nodes of GPUs.
"""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, ordered_cores, whole_cores
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.regions import by_l3, groups
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import count_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REASONS = {
    "node": "each rank on all cores of its NUMA node, which it shares with the other ranks there",
    "socket": "each rank on all cores of its socket, which it shares with the other ranks there",
    "exclusive": "each rank on its equal share of the cores of its NUMA node",
    "core-complex": "each rank on one L3 cache of its NUMA node",
}


def bind_like_torchrun(pool: Pool, binding: str, count: int, *, smt: bool) -> Placement:
    """The CPUs of `count` ranks. `smt`: a thread for every logical CPU, not for every core.

    Raises: UsageError if `exclusive` finds fewer cores than ranks on a NUMA node.
    """
    units = groups(ordered_cores(pool), lambda core: core.socket if binding == "socket" else core.numa_node)
    unit_of_rank = [rank * len(units) // count for rank in range(count)]
    shares = [
        share
        for index, unit in enumerate(units)
        for share in _cores_of_ranks(unit, unit_of_rank.count(index), binding, pool.source)
    ]
    threads = min(len(cores) // ranks for cores, ranks in shares) or 1
    if binding == "exclusive":
        shares = [(cores[:threads], ranks) for cores, ranks in shares]
    return Placement(
        workers=tuple(whole_cores(cores, threads * len(cores[0].cpus) if smt else threads) for cores, _ in shares),
        exclusive=all(ranks == 1 for _, ranks in shares),
        reason=f"--numa-binding {binding}: {_REASONS[binding]}",
    )


def _cores_of_ranks(
    unit: Sequence[Core], ranks: int, binding: str, source: str
) -> Iterator[tuple[Sequence[Core], int]]:
    """For each rank of a NUMA node or socket, its cores and the number of ranks that share them."""
    if binding == "exclusive" and ranks:
        size = len(unit) // ranks
        if not size:
            raise UsageError(
                "--numa-binding exclusive needs a core for every rank",
                value=f"{ranks} ranks on the {count_text(len(unit), 'core')} of NUMA node {unit[0].numa_node}",
                source=source,
                hint="start fewer ranks, or share cores with --numa-binding node",
            )
        yield from ((unit[position * size : (position + 1) * size], 1) for position in range(ranks))
        return
    parts = sorted(groups(unit, by_l3), key=len, reverse=True) if binding == "core-complex" else [unit]
    for position in range(ranks):
        index = position % len(parts)
        yield parts[index], len(range(index, ranks, len(parts)))
