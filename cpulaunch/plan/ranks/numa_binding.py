"""torchrun's --numa-binding on hosts where ranks compute on CPUs: dealt evenly over NUMA nodes or sockets.

All logical CPUs of a core belong to its rank, as there; a rank gets as many threads as its fair share of the cores.
Source: torch 2.13, torch/numa/binding.py, which does this for the NUMA nodes of GPUs.
"""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, in_order
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.regions import by_l3, groups
from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MEANINGS = {
    "node": "each rank on all cores of its NUMA node, which it shares with the other ranks there",
    "socket": "each rank on all cores of its socket, which it shares with the other ranks there",
    "exclusive": "each rank on its equal share of the cores of its NUMA node",
    "core-complex": "each rank on one L3 cache of its NUMA node",
}


def bind_near(pool: Pool, binding: str, count: int, *, smt: bool) -> Placement:
    """The CPUs of `count` ranks. `smt`: a thread for every logical CPU, not for every core.

    Raises: UsageError if a NUMA node has fewer cores than ranks that want their own.
    """
    homes = groups(in_order(pool), lambda core: core.socket if binding == "socket" else core.numa_node)
    dealt = [index * len(homes) // count for index in range(count)]
    places = [
        place for index, home in enumerate(homes) for place in _places(home, dealt.count(index), binding, pool.source)
    ]
    share = min(len(cores) // sharing for cores, sharing in places) or 1
    if binding == "exclusive":
        places = [(cores[:share], sharing) for cores, sharing in places]
    return Placement(
        workers=tuple(_worker_cpus(cores, share, smt=smt) for cores, _ in places),
        exclusive=all(sharing == 1 for _, sharing in places),
        reason=f"--numa-binding {binding}: {_MEANINGS[binding]}",
    )


def _places(home: Sequence[Core], ranks: int, binding: str, source: str) -> Iterator[tuple[Sequence[Core], int]]:
    """The cores of each rank of one NUMA node or socket, and how many ranks share them."""
    if binding == "exclusive" and ranks:
        size = len(home) // ranks
        if not size:
            raise UsageError(
                "fewer cores than ranks that want cores of their own",
                value=f"{ranks} ranks on the {len(home)} cores of NUMA node {home[0].numa_node}",
                source=source,
                hint="fewer ranks, or --numa-binding node to share cores",
            )
        yield from ((home[position * size : (position + 1) * size], 1) for position in range(ranks))
        return
    parts = sorted(groups(home, by_l3), key=len, reverse=True) if binding == "core-complex" else [home]
    for position in range(ranks):
        index = position % len(parts)
        yield parts[index], len(range(index, ranks, len(parts)))


def _worker_cpus(cores: Sequence[Core], share: int, *, smt: bool) -> WorkerCpus:
    cpus = frozenset(cpu for core in cores for cpu in core.allowed)
    return WorkerCpus(tuple(cores), cpus, min(len(cpus), share * len(cores[0].cpus) if smt else share))
