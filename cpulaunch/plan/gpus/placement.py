"""CPUs for ranks that compute on GPUs: cores next to each rank's GPU, the same number for every rank.

Ranks are equal in size because the slowest one delays all others. The cores next to a GPU are the pool's cores on its
NUMA node, or those that the firmware lists; on a machine that reports neither, they are all cores of the pool. A rank
stays inside an L3 cache that it fits inside.
"""

from __future__ import annotations

from cpulaunch.plan.gpus.visible_devices import Device
from cpulaunch.plan.placement.instances import Placement, WorkerCpus, ordered_cores, whole_cores, worker_cpus
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.quota import usable_threads
from cpulaunch.plan.placement.regions import Region, by_l3, by_node, capacity, deal, groups, outermost, region_of
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Gpu, Host, count_text
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

Cores: TypeAlias = "tuple[Core, ...]"


@record(kw_only=False)
class _RankGroup:
    """Ranks whose GPUs have the same cores next to them, and those cores."""

    cores: Cores
    ranks: tuple[int, ...]


@record(kw_only=False)
class _GpuCores:
    """The cores next to a device, the number of visible devices next to the same cores, and its position in them."""

    cores: Cores
    devices: int
    position: int


def place_next_to_gpus(
    host: Host, request: LaunchRequest, pool: Pool, devices: Sequence[Device], visible: Sequence[Device]
) -> Placement:
    """The CPUs of each rank. `devices`: the device of each rank; `visible`: all devices, also those without a rank.

    Raises: UsageError if --numa-binding exclusive finds fewer cores than GPUs.
    """
    cores = ordered_cores(pool)
    local = {device.gpu: _local_cores(host, cores, device.gpu) for device in visible}
    if request.settings.numa_binding is not None:
        return _like_torchrun(
            pool, request.settings.numa_binding, [_gpu_cores(local, each, visible) for each in devices]
        )
    cores_of_ranks = [local[device.gpu] for device in devices]
    if not pool.pinned:
        return _unpinned(pool, cores_of_ranks)
    rank_groups = _rank_groups(cores_of_ranks)
    for size in range(min(len(group.cores) // len(group.ranks) for group in rank_groups), 0, -1):
        workers = _equal_shares(rank_groups, size)
        if workers is not None:
            idle = _idle_text(cores, workers, rank_groups)
            reason = f"{len(devices)} next to their GPUs, {count_text(size, 'core')} each{idle}"
            return Placement(workers=workers, exclusive=True, reason=reason)
    return _shared(rank_groups, len(devices))


def _gpu_cores(local: Mapping[int | None, Cores], device: Device, visible: Sequence[Device]) -> _GpuCores:
    cores = local[device.gpu]
    neighbours = [other for other in visible if local[other.gpu] == cores]
    return _GpuCores(cores, len(neighbours), neighbours.index(device))


def _local_cores(host: Host, cores: Cores, index: int | None) -> Cores:
    """The cores next to the host's GPU of this index; all cores if its NUMA node is unknown."""
    if index is None:
        return cores
    gpu = host.gpus[index]
    if gpu.numa_node is None or not host.numa_nodes:
        listed = tuple(core for core in cores if not gpu.cpus.isdisjoint(core.allowed))
        return listed or cores
    on_its_node = tuple(core for core in cores if core.numa_node == gpu.numa_node)
    return on_its_node or _cores_of_closest_node(host, cores, gpu.numa_node)


def _cores_of_closest_node(host: Host, cores: Cores, node: int) -> Cores:
    """The cores of the NUMA node closest to `node` that has any; all cores if the machine reports no distances."""
    with_cores = {core.numa_node for core in cores}
    distances = [
        (distance, other)
        for entry in host.numa_nodes
        if entry.id == node
        for other, distance in entry.distances
        if other in with_cores
    ]
    return tuple(core for core in cores if core.numa_node == min(distances)[1]) if distances else cores


def remote_warnings(host: Host, pool: Pool, devices: Sequence[Device]) -> tuple[str, ...]:
    """Warnings for GPUs on a NUMA node that has CPUs, none of them in the pool.

    A NUMA node without any CPUs, such as the memory of a GPU, is no reason to warn.
    """
    cores, indexes = ordered_cores(pool), sorted({device.gpu for device in devices if device.gpu is not None})
    with_cpus = {node.id for node in host.numa_nodes if node.cpus}
    remote: dict[int, list[Gpu]] = {}
    for gpu in (host.gpus[index] for index in indexes):
        node = gpu.numa_node
        if node in with_cpus and node is not None and all(core.numa_node != node for core in cores):
            remote.setdefault(node, []).append(gpu)
    return tuple(_remote_text(gpus, node, _cores_of_closest_node(host, cores, node)) for node, gpus in remote.items())


def _remote_text(gpus: Sequence[Gpu], node: int, cores: Cores) -> str:
    plural = len(gpus) > 1
    names = f"GPU{'s' * plural} {format_cpulist(gpu.index for gpu in gpus)} {'are' if plural else 'is'}"
    chosen = format_cpulist({core.numa_node for core in cores})
    return f"{names} on NUMA node {node}, where this process may use no core: the ranks run on NUMA node {chosen}"


def _rank_groups(cores_of_ranks: Sequence[Cores]) -> list[_RankGroup]:
    """The ranks grouped by the cores next to their GPUs, the group with the fewest cores first."""
    ranks: dict[Cores, list[int]] = {}
    for rank, cores in enumerate(cores_of_ranks):
        ranks.setdefault(cores, []).append(rank)
    return [_RankGroup(cores, tuple(ranks[cores])) for cores in sorted(ranks, key=len)]


def _equal_shares(rank_groups: Sequence[_RankGroup], size: int) -> tuple[WorkerCpus, ...] | None:
    """`size` cores for every rank, in the order of the ranks; None if a group runs out of cores."""
    workers: dict[int, WorkerCpus] = {}
    taken: set[int] = set()
    for group in rank_groups:
        free = tuple(core for core in group.cores if core.cpus[0] not in taken)
        if len(free) < size * len(group.ranks):
            return None
        for rank, cores in zip(group.ranks, _split(free, size, len(group.ranks)), strict=True):
            workers[rank] = worker_cpus(cores)
            taken.update(core.cpus[0] for core in cores)
    return tuple(workers[rank] for rank in sorted(workers))


def _split(cores: Cores, size: int, count: int) -> list[Cores]:
    """`count` parts of `size` cores, inside the smallest regions that hold them all."""
    outer = outermost(cores)
    regions = (region_of(cores, (outer, by_node, by_l3)), region_of(cores, (outer, by_node)))
    region = next((region for region in regions if capacity(region, size) >= count), Region(cores))
    return [
        part.cores[position * size : (position + 1) * size]
        for part, share in deal(region, size, count, spread=True)
        for position in range(share)
    ]


def _idle_text(cores: Cores, workers: Sequence[WorkerCpus], rank_groups: Sequence[_RankGroup]) -> str:
    """The end of a note: how many cores stay idle and where; "" if none."""
    near = {core.cpus[0] for group in rank_groups for core in group.cores}
    used = sum(len(worker.cores) for worker in workers)
    parts = []
    if left := len(near) - used:
        parts.append(f"{left} next to the GPUs")
    if far := len(cores) - len(near):
        parts.append(f"{far} not next to any of these GPUs")
    return f"; idle cores: {', '.join(parts)}" if parts else ""


def _shared(rank_groups: Sequence[_RankGroup], count: int) -> Placement:
    """The placement for more ranks than cores next to their GPUs: one core each, assigned in turn."""
    workers: dict[int, WorkerCpus] = {}
    for group in rank_groups:
        for position, rank in enumerate(group.ranks):
            workers[rank] = worker_cpus((group.cores[position % len(group.cores)],))
    cores = count_text(len({core.cpus[0] for group in rank_groups for core in group.cores}), "core")
    return Placement(
        workers=tuple(workers[rank] for rank in range(count)),
        exclusive=len({worker.cpus for worker in workers.values()}) == count,
        reason=f"{count} share the {cores} next to their GPUs",
        warnings=(f"{count} ranks share the {cores} next to their GPUs and take turns",),
    )


def _unpinned(pool: Pool, cores_of_ranks: Sequence[Cores]) -> Placement:
    """The placement under a CPU quota without a cpuset: each rank on all cores next to its GPU, threads limited."""
    ranks, threads = len(cores_of_ranks), usable_threads(pool)
    return Placement(
        workers=tuple(whole_cores(cores, max(1, threads // ranks)) for cores in cores_of_ranks),
        exclusive=False,
        reason=f"{ranks} on a quota of {threads} CPUs, next to their GPUs, not pinned to single cores",
    )


def _like_torchrun(pool: Pool, binding: str, gpu_cores: Sequence[_GpuCores]) -> Placement:
    """The CPUs that torchrun's --numa-binding gives, on all logical CPUs of each core.

    Source: torch 2.13, torch/numa/binding.py.
    """
    cores_of_ranks = [_bound_cores(pool, binding, each) for each in gpu_cores]
    sharing = [sum(not {*own}.isdisjoint(other) for other in cores_of_ranks) for own in cores_of_ranks]
    threads_per_core = len(pool.cores[0].cpus)
    return Placement(
        workers=tuple(
            whole_cores(cores, max(1, len(cores) // ranks) * threads_per_core)
            for cores, ranks in zip(cores_of_ranks, sharing, strict=True)
        ),
        exclusive=all(ranks == 1 for ranks in sharing),
        reason=f"--numa-binding {binding}, by the NUMA node of each rank's GPU",
    )


def _bound_cores(pool: Pool, binding: str, gpu_cores: _GpuCores) -> Cores:
    """The cores of one rank. Raises: UsageError if `exclusive` finds fewer cores than devices."""
    cores, devices, position = gpu_cores.cores, gpu_cores.devices, gpu_cores.position
    if binding == "node":
        return cores
    if binding == "socket":
        return tuple(core for core in ordered_cores(pool) if core.socket in {near.socket for near in cores})
    if binding == "exclusive":
        each, extra = divmod(len(cores), devices)
        if not each:
            raise UsageError(
                "--numa-binding exclusive needs a core for every GPU",
                value=f"{count_text(devices, 'GPU')} next to {count_text(len(cores), 'core')}",
                source=pool.source,
                hint="--numa-binding node shares cores",
            )
        start = position * each + min(position, extra)
        return cores[start : start + each + (position < extra)]
    caches = sorted(groups(cores, by_l3), key=lambda group: (-len(group), group[0].cpus[0]))
    return tuple(caches[position % len(caches)])
