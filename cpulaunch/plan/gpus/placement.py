"""The cores next to GPUs, shared fairly: ranks are equal in size, because the slowest holds up all others.

Next to a GPU are the pool's cores on its NUMA node, or those the firmware names; on machines that do not say, all of
them. CPUs stay inside an L3 cache that they fit inside.
"""

from __future__ import annotations

from cpulaunch.plan.gpus.visible_devices import Device
from cpulaunch.plan.placement.instances import Placement, WorkerCpus, in_order, worker_cpus
from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.quota import paid_threads
from cpulaunch.plan.placement.regions import Region, by_l3, by_node, capacity, deal, groups, outermost, region_of
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Gpu, Host
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

Cores: TypeAlias = "tuple[Core, ...]"


@record(kw_only=False)
class _Home:
    """Cores that are next to the GPUs of the same ranks, and those ranks."""

    cores: Cores
    ranks: tuple[int, ...]


@record(kw_only=False)
class _GpuCores:
    """The cores next to a rank's device, how many visible devices they are next to, and which of these it is."""

    cores: Cores
    devices: int
    position: int


def next_to_gpus(
    host: Host, request: LaunchRequest, pool: Pool, given: Sequence[Device], visible: Sequence[Device]
) -> Placement:
    """The CPUs of ranks that compute on these devices. `visible`: all devices, also those without a rank.

    Raises: UsageError if --numa-binding exclusive finds fewer cores than GPUs.
    """
    cores = in_order(pool)
    near = {device.gpu: _near(host, cores, device.gpu) for device in visible}
    if request.settings.numa_binding is not None:
        return _bound(request, pool, [_gpu_cores(near, device, visible) for device in given])
    places = [near[device.gpu] for device in given]
    if not pool.pinned:
        return _unpinned(pool, places)
    homes = _homes(places)
    for size in range(min(len(home.cores) // len(home.ranks) for home in homes), 0, -1):
        workers = _divided(homes, size)
        if workers is not None:
            reason = f"{len(given)} next to their GPUs, {_cores_text(size)} each{_idle(cores, workers, homes)}"
            return Placement(workers=workers, exclusive=True, reason=reason)
    return _crowded(homes, len(given))


def _gpu_cores(near: Mapping[int | None, Cores], device: Device, visible: Sequence[Device]) -> _GpuCores:
    cores = near[device.gpu]
    beside = [other for other in visible if near[other.gpu] == cores]
    return _GpuCores(cores, len(beside), beside.index(device))


def _near(host: Host, cores: Cores, index: int | None) -> Cores:
    """The cores next to the host's GPU of this index; all where nothing says."""
    if index is None:
        return cores
    gpu = host.gpus[index]
    if gpu.numa_node is None or not host.numa_nodes:
        local = tuple(core for core in cores if not gpu.cpus.isdisjoint(core.allowed))
        return local or cores
    own = tuple(core for core in cores if core.numa_node == gpu.numa_node)
    return own or _nearest(host, cores, gpu.numa_node)


def _nearest(host: Host, cores: Cores, node: int) -> Cores:
    """The cores of the closest NUMA node that has some; all where the machine names no distance."""
    ours = {core.numa_node for core in cores}
    distances = [
        (distance, other)
        for entry in host.numa_nodes
        if entry.id == node
        for other, distance in entry.distances
        if other in ours
    ]
    return tuple(core for core in cores if core.numa_node == min(distances)[1]) if distances else cores


def remote_warnings(host: Host, pool: Pool, given: Sequence[Device]) -> tuple[str, ...]:
    """Warnings for GPUs next to which no core is ours. A NUMA node that has no CPUs (a GPU's memory) is fine."""
    cores, indexes = in_order(pool), sorted({device.gpu for device in given if device.gpu is not None})
    with_cpus = {node.id for node in host.numa_nodes if node.cpus}
    remote: dict[int, list[Gpu]] = {}
    for gpu in (host.gpus[index] for index in indexes):
        node = gpu.numa_node
        if node in with_cpus and node is not None and all(core.numa_node != node for core in cores):
            remote.setdefault(node, []).append(gpu)
    return tuple(_remote_text(gpus, node, _nearest(host, cores, node)) for node, gpus in remote.items())


def _remote_text(gpus: Sequence[Gpu], node: int, cores: Cores) -> str:
    names = f"GPU {format_cpulist(gpu.index for gpu in gpus)} {'is' if len(gpus) == 1 else 'are'}"
    instead = format_cpulist({core.numa_node for core in cores})
    return f"{names} on NUMA node {node}, where no core is ours: ranks run on NUMA node {instead}"


def _homes(places: Sequence[Cores]) -> list[_Home]:
    """Ranks with the same cores next to them together, the fewest cores first."""
    ranks: dict[Cores, list[int]] = {}
    for rank, cores in enumerate(places):
        ranks.setdefault(cores, []).append(rank)
    return [_Home(cores, tuple(ranks[cores])) for cores in sorted(ranks, key=len)]


def _divided(homes: Sequence[_Home], size: int) -> tuple[WorkerCpus, ...] | None:
    """CPUs of `size` cores in the order of the ranks; None if one home has too few left by those before it."""
    workers: dict[int, WorkerCpus] = {}
    taken: set[int] = set()
    for home in homes:
        free = tuple(core for core in home.cores if core.cpus[0] not in taken)
        if len(free) < size * len(home.ranks):
            return None
        for rank, cores in zip(home.ranks, _cut(free, size, len(home.ranks)), strict=True):
            workers[rank] = worker_cpus(cores)
            taken.update(core.cpus[0] for core in cores)
    return tuple(workers[rank] for rank in sorted(workers))


def _cut(cores: Cores, size: int, count: int) -> list[Cores]:
    """`count` parts of `size` cores, inside the smallest regions that hold them all."""
    outer = outermost(cores)
    regions = (region_of(cores, (outer, by_node, by_l3)), region_of(cores, (outer, by_node)))
    region = next((region for region in regions if capacity(region, size) >= count), Region(cores))
    return [
        part.cores[position * size : (position + 1) * size]
        for part, share in deal(region, size, count, spread=True)
        for position in range(share)
    ]


def _idle(cores: Cores, workers: Sequence[WorkerCpus], homes: Sequence[_Home]) -> str:
    """What is left over, in words."""
    near = {core.cpus[0] for home in homes for core in home.cores}
    used = sum(len(placed.cores) for placed in workers)
    parts = []
    if left := len(near) - used:
        parts.append(f"{left} left over beside them")
    if far := len(cores) - len(near):
        parts.append(f"{far} not next to any of these GPUs")
    return f"; {' and '.join(parts)} stay idle" if parts else ""


def _cores_text(count: int) -> str:
    return f"{count} core{'s' * (count > 1)}"


def _crowded(homes: Sequence[_Home], count: int) -> Placement:
    """More ranks than cores next to their GPUs: a core each, shared in turn."""
    workers: dict[int, WorkerCpus] = {}
    for home in homes:
        for position, rank in enumerate(home.ranks):
            workers[rank] = worker_cpus((home.cores[position % len(home.cores)],))
    cores = len({core.cpus[0] for home in homes for core in home.cores})
    return Placement(
        workers=tuple(workers[rank] for rank in range(count)),
        exclusive=len({placed.cpus for placed in workers.values()}) == count,
        reason=f"{count} on the {_cores_text(cores)} next to their GPUs, which they share",
        warnings=(f"{count} ranks on the {_cores_text(cores)} next to their GPUs: they take turns",),
    )


def _unpinned(pool: Pool, places: Sequence[Cores]) -> Placement:
    """Under a CPU quota without a cpuset: every rank on all cores next to its GPU, so many threads at a time."""
    cpu_limit = max(1, paid_threads(pool) // len(places))
    return Placement(
        workers=tuple(_wide(cores, cpu_limit) for cores in places),
        exclusive=False,
        reason=f"{len(places)} on a quota of {paid_threads(pool)} CPUs, next to their GPUs, not pinned to single cores",
    )


def _wide(cores: Cores, cpu_limit: int) -> WorkerCpus:
    """A worker on every logical CPU of these cores, of which at most `cpu_limit` are busy at a time."""
    cpus = frozenset(cpu for core in cores for cpu in core.allowed)
    return WorkerCpus(cores, cpus, min(cpu_limit, len(cpus)))


def _bound(request: LaunchRequest, pool: Pool, seats: Sequence[_GpuCores]) -> Placement:
    """CPUs as torchrun's --numa-binding makes them, on all logical CPUs of a core.

    Source: torch 2.13, torch/numa/binding.py.
    """
    binding = request.settings.numa_binding or ""
    places = [_part(pool, binding, seat) for seat in seats]
    sharing = [sum(not {*own}.isdisjoint(other) for other in places) for own in places]
    threads_each = len(pool.cores[0].cpus)
    return Placement(
        workers=tuple(
            _wide(cores, max(1, len(cores) // number) * threads_each)
            for cores, number in zip(places, sharing, strict=True)
        ),
        exclusive=all(number == 1 for number in sharing),
        reason=f"--numa-binding {binding}, by the NUMA node of each rank's GPU",
    )


def _part(pool: Pool, binding: str, seat: _GpuCores) -> Cores:
    """The cores of a rank. Raises: UsageError if there are fewer than devices that want their own."""
    home = seat.cores
    if binding == "node":
        return home
    if binding == "socket":
        return tuple(core for core in in_order(pool) if core.socket in {near.socket for near in home})
    if binding == "exclusive":
        each, extra = divmod(len(home), seat.devices)
        if not each:
            raise UsageError(
                "fewer cores than GPUs that want cores of their own",
                value=f"{seat.devices} GPUs beside {_cores_text(len(home))}",
                source=pool.source,
                hint="--numa-binding node to share cores",
            )
        start = seat.position * each + min(seat.position, extra)
        return home[start : start + each + (seat.position < extra)]
    caches = sorted(groups(home, by_l3), key=lambda cores: (-len(cores), cores[0].cpus[0]))
    return tuple(caches[seat.position % len(caches)])
