"""Placement under a CPU quota without a cpuset: the CPUs are not ours, only so many threads at a time are."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, check_size, instance_count
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.records.host import Host
from cpulaunch.records.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def place_unpinned(host: Host, pool: Pool, settings: Settings) -> Placement:
    """CPUs that keep each worker inside a NUMA node that is wide enough, on all of its CPUs.

    Nodes with more free memory come first, so that not every container of a machine chooses node 0.
    Raises: UsageError if an instance asks for more cores than the quota pays for.
    """
    total = paid_threads(pool)
    check_size(settings, f"the CPU quota pays for {total}", total)
    count = _count(settings, pool, total)
    cpu_limits = [settings.cores_per_instance or cpu_limit for cpu_limit in shares(total, count)]
    return unpinned(host, pool, cpu_limits, spread=settings.strategy == "spread")


def paid_threads(pool: Pool) -> int:
    """Threads that all workers together may run at a time."""
    return len(pool.cores) if pool.quota_threads is None else pool.quota_threads


def unpinned(host: Host, pool: Pool, cpu_limits: Sequence[int], *, spread: bool) -> Placement:
    """The CPUs of workers with these limits, each inside a NUMA node that is wide enough."""
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
        reason=f"{len(cpu_limits)} on a quota of {paid_threads(pool)} CPUs, inside NUMA nodes, not pinned to cores",
    )


def shares(total: int, count: int) -> list[int]:
    """`total` threads divided over `count` workers, the first get the remainder, each at least 1."""
    each, rest = divmod(total, count)
    return [max(1, each + (1 if index < rest else 0)) for index in range(count)]


def _count(settings: Settings, pool: Pool, total: int) -> int:
    if settings.instances is None and settings.cores_per_instance is None:
        return 1
    return instance_count(settings, pool) or max(1, total // (settings.cores_per_instance or 1))


def _nodes(host: Host, cores: Sequence[Core]) -> list[list[Core]]:
    """The pool's cores by NUMA node, most free memory first."""
    free = {node.id: node.free_bytes or 0 for node in host.numa_nodes}
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core)
    return [nodes[id_] for id_ in sorted(nodes, key=lambda id_: (-free.get(id_, 0), id_))]


def _choose(nodes: Sequence[Sequence[Core]], loads: Sequence[int], cpu_limit: int, *, spread: bool) -> int | None:
    """The node for one more worker with this limit; None if it fits inside no node."""
    wide = [index for index in range(len(nodes)) if len(nodes[index]) >= cpu_limit]
    if not wide:
        return None
    roomy = [index for index in wide if len(nodes[index]) - loads[index] >= cpu_limit]
    if roomy and not spread:
        return roomy[0]
    return min(roomy or wide, key=lambda index: (loads[index] / len(nodes[index]), index))


def _worker_cpus(cores: Sequence[Core], cpu_limit: int) -> WorkerCpus:
    return WorkerCpus(tuple(cores), frozenset(cpu for core in cores for cpu in core.allowed), cpu_limit)
