"""Placement under a CPU quota without a cpuset: it limits the threads that run at a time, not the CPUs they use."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, check_size, instance_count
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.regions import groups
from cpulaunch.records.host import Host, count_text
from cpulaunch.records.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def place_unpinned(host: Host, pool: Pool, settings: Settings) -> Placement:
    """The CPUs of all instances: each on all CPUs of one NUMA node that has enough, else of all nodes.

    NUMA nodes with more free memory come first, so that not every container of a machine chooses node 0.
    Raises: UsageError if an instance needs more cores than the quota allows.
    """
    total = usable_threads(pool)
    check_size(settings, total, f"the CPU quota of {total}", source=pool.source)
    instances = _instance_count(settings, pool, total)
    cpu_limits = [settings.cores_per_instance or share for share in shares(total, instances)]
    return place_within_nodes(host, pool, cpu_limits, spread=settings.strategy == "spread", noun="instance")


def usable_threads(pool: Pool) -> int:
    """The number of threads that all workers together may run at a time."""
    return len(pool.cores) if pool.quota_threads is None else pool.quota_threads


def place_within_nodes(host: Host, pool: Pool, cpu_limits: Sequence[int], *, spread: bool, noun: str) -> Placement:
    """The CPUs of workers with these limits, each inside one NUMA node that has enough CPUs, where there is one."""
    nodes = _nodes(host, pool.cores)
    loads = [0] * len(nodes)
    workers = []
    for cpu_limit in cpu_limits:
        chosen = _choose(nodes, loads, cpu_limit, spread=spread)
        if chosen is None:
            workers.append(_worker_cpus(pool.cores, cpu_limit))
        else:
            loads[chosen] += cpu_limit
            workers.append(_worker_cpus(nodes[chosen], cpu_limit))
    return Placement(
        workers=tuple(workers),
        exclusive=False,
        reason=f"{count_text(len(cpu_limits), noun)} on a CPU quota of {usable_threads(pool)}, not pinned to cores",
    )


def shares(total: int, count: int) -> list[int]:
    """`total` threads divided among `count` workers: the first get the remainder, each gets at least 1."""
    each, rest = divmod(total, count)
    return [max(1, each + (1 if index < rest else 0)) for index in range(count)]


def _instance_count(settings: Settings, pool: Pool, total: int) -> int:
    if settings.instances is None and settings.cores_per_instance is None:
        return 1
    return instance_count(settings, pool) or max(1, total // (settings.cores_per_instance or 1))


def _nodes(host: Host, cores: Sequence[Core]) -> list[list[Core]]:
    """The pool's cores by NUMA node, the one with the most free memory first."""
    free = {node.id: node.free_bytes or 0 for node in host.numa_nodes}
    nodes = groups(cores, lambda core: core.numa_node)
    return sorted(nodes, key=lambda node: (-free.get(node[0].numa_node, 0), node[0].numa_node))


def _choose(nodes: Sequence[Sequence[Core]], loads: Sequence[int], cpu_limit: int, *, spread: bool) -> int | None:
    """The index of the NUMA node for one more worker with this limit; None if it fits inside no node."""
    large_enough = [index for index in range(len(nodes)) if len(nodes[index]) >= cpu_limit]
    if not large_enough:
        return None
    free = [index for index in large_enough if len(nodes[index]) - loads[index] >= cpu_limit]
    if free and not spread:
        return free[0]
    return min(free or large_enough, key=lambda index: (loads[index] / len(nodes[index]), index))


def _worker_cpus(cores: Sequence[Core], cpu_limit: int) -> WorkerCpus:
    return WorkerCpus(tuple(cores), frozenset(cpu for core in cores for cpu in core.allowed), cpu_limit)
