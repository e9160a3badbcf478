"""The CPUs of the ranks of a job, as many for each, because the slowest rank delays all others.

A rank stays inside an L3, NUMA node and socket that it fits inside; left-over cores stay idle. If there are more ranks
than cores, ranks share cores: each has an SMT sibling to itself as long as there are enough.
"""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, divide, ordered_cores, whole_cores, worker_cpus
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.quota import place_within_nodes, usable_threads
from cpulaunch.plan.placement.regions import Key, groups
from cpulaunch.plan.ranks.numa_binding import bind_like_torchrun
from cpulaunch.records.host import Host, count_text
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UNITS: Mapping[object, tuple[str, Key]] = {
    "numa": ("NUMA node", lambda core: core.numa_node),
    "socket": ("socket", lambda core: core.socket),
    "l3": ("L3 cache", lambda core: (core.socket, core.numa_node, core.l3)),
}
"""The parts of a machine that --nproc-per-node can count: name in messages, and what identifies a core's part."""


def place_ranks(host: Host, request: LaunchRequest, pool: Pool, count: int) -> Placement:
    """The CPUs of each rank of this host, as many for each.

    Raises: UsageError if --numa-binding exclusive finds fewer cores than ranks on a NUMA node.
    """
    settings = request.settings
    if settings.numa_binding is not None:
        return bind_like_torchrun(pool, settings.numa_binding, count, smt=settings.smt)
    if not pool.pinned:
        cpu_limit = max(1, usable_threads(pool) // count)
        placed = place_within_nodes(host, pool, [cpu_limit] * count, spread=settings.strategy == "spread", noun="rank")
        return Placement(workers=placed.workers, exclusive=False, reason=placed.reason)
    if settings.nproc_per_node in UNITS:
        return _one_per_unit(pool, *UNITS[settings.nproc_per_node])
    cores = ordered_cores(pool)
    if count == 1:
        return Placement(workers=(worker_cpus(cores),), exclusive=True, reason="one rank over the whole pool")
    if count > len(cores):
        return _shared(cores, count)
    return divide(cores, count, spread=settings.strategy == "spread", uneven=False, noun="rank")


def _one_per_unit(pool: Pool, name: str, key: Key) -> Placement:
    """One rank for each unit, on as many of its cores as the smallest unit has."""
    units = groups(ordered_cores(pool), key)
    size = min(len(unit) for unit in units)
    idle = sum(len(unit) - size for unit in units)
    trimmed = f", as large as the smallest ({count_text(idle, 'idle core')})" if idle else ""
    return Placement(
        workers=tuple(worker_cpus(unit[:size]) for unit in units),
        exclusive=True,
        reason=f"one rank per {name} with CPUs in the pool{trimmed}",
    )


def _shared(cores: tuple[Core, ...], count: int) -> Placement:
    """The placement for more ranks than cores: one logical CPU each if there are enough, else a shared NUMA node."""
    cpus = [(core, cpu) for core in cores for cpu in core.allowed]
    cores_text = count_text(len(cores), "core")
    chosen = [cpus[rank * len(cpus) // count] for rank in range(count)]
    if count <= len(cpus):
        workers = tuple(WorkerCpus((core,), frozenset((cpu,)), 1) for core, cpu in chosen)
        effect, reason = "SMT siblings compute too and slow each other down", "a logical CPU each"
    else:
        nodes = {node[0].numa_node: whole_cores(node, 1) for node in groups(cores, UNITS["numa"][1])}
        workers = tuple(nodes[core.numa_node] for core, _ in chosen)
        effect, reason = "they share CPUs and take turns", "shared inside NUMA nodes"
    return Placement(
        workers=workers,
        exclusive=count <= len(cpus),
        reason=f"{count} on {count_text(len(cpus), 'CPU')} ({cores_text}), {reason}",
        warnings=(f"{count} ranks on {cores_text}: {effect}",),
    )
