"""Where the ranks of a job run: CPUs of equal number for each, because the slowest rank holds up all others.

A rank stays inside an L3, NUMA node and socket that it fits inside; left-over cores stay idle. More ranks than cores
share them: SMT siblings first, where there are any.
"""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, divide, in_order, worker_cpus
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.quota import paid_threads, unpinned
from cpulaunch.plan.placement.regions import Key, groups
from cpulaunch.plan.ranks.numa_binding import bind_near
from cpulaunch.records.host import Host
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UNITS: Mapping[object, tuple[str, Key]] = {
    "numa": ("NUMA node", lambda core: core.numa_node),
    "socket": ("socket", lambda core: core.socket),
    "l3": ("L3 cache", lambda core: (core.socket, core.numa_node, core.l3)),
}
"""What a rank can be started for each of: its name, and what tells two of them apart."""


def place_ranks(host: Host, request: LaunchRequest, pool: Pool, count: int) -> Placement:
    """CPUs of equal size, one for each rank of this host. Raises: UsageError if --numa-binding cannot be met."""
    settings = request.settings
    if settings.numa_binding is not None:
        return bind_near(pool, settings.numa_binding, count, smt=settings.smt)
    if not pool.pinned:
        cpu_limit = max(1, paid_threads(pool) // count)
        placed = unpinned(host, pool, [cpu_limit] * count, spread=settings.strategy == "spread")
        return Placement(workers=placed.workers, exclusive=False, reason=placed.reason)
    if settings.nproc_per_node in UNITS:
        return _one_per_unit(pool, *UNITS[settings.nproc_per_node])
    cores = in_order(pool)
    if count == 1:
        return Placement(workers=(worker_cpus(cores),), exclusive=True, reason="one rank over the whole pool")
    if count > len(cores):
        return _crowded(cores, count)
    return divide(cores, count, spread=settings.strategy == "spread", grow=False, noun="ranks")


def _one_per_unit(pool: Pool, name: str, key: Key) -> Placement:
    """A rank for each unit, on all of its cores or on as many as the smallest unit has."""
    units = groups(in_order(pool), key)
    size = min(len(unit) for unit in units)
    idle = sum(len(unit) - size for unit in units)
    trimmed = f", as large as the smallest: {idle} cores idle" if idle else ""
    return Placement(
        workers=tuple(worker_cpus(unit[:size]) for unit in units),
        exclusive=True,
        reason=f"one rank per {name} with CPUs in the pool{trimmed}",
    )


def _crowded(cores: tuple[Core, ...], count: int) -> Placement:
    """More ranks than cores: a logical CPU each while there are enough, else each on all CPUs of a NUMA node."""
    cpus = [(core, cpu) for core in cores for cpu in core.allowed]
    if count <= len(cpus):
        chosen = [cpus[index * len(cpus) // count] for index in range(count)]
        workers = tuple(WorkerCpus((core,), frozenset((cpu,)), 1) for core, cpu in chosen)
        how, reason = "SMT siblings compute too and slow each other", "a logical CPU each"
    else:
        homes = {home[0].numa_node: _home(home) for home in groups(cores, UNITS["numa"][1])}
        workers = tuple(homes[cpus[index * len(cpus) // count][0].numa_node] for index in range(count))
        how, reason = "they share CPUs and take turns", "shared inside NUMA nodes"
    return Placement(
        workers=workers,
        exclusive=count <= len(cpus),
        reason=f"{count} on {len(cpus)} CPUs of {len(cores)} cores, {reason}",
        warnings=(f"{count} ranks on {len(cores)} core{'s' if len(cores) > 1 else ''}: {how}",),
    )


def _home(cores: list[Core]) -> WorkerCpus:
    """All CPUs of a NUMA node, for a rank that has one thread there."""
    return WorkerCpus(tuple(cores), frozenset(cpu for core in cores for cpu in core.allowed), 1)
