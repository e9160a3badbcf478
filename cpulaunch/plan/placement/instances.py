"""Which cores each instance gets. The rules are those of "Placement" in the documentation of the design:

an instance stays inside an L3, NUMA node and socket that it fits inside, sizes are equal up to one core, and only
if that idles more than a quarter of the pool do instances cross, with a warning.
"""

from __future__ import annotations

from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.regions import Region, by_l3, by_node, capacity, deal, outermost, region_of
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record
from cpulaunch.records.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TOLERATED_IDLE = 4
"""One part in this many of the pool may idle before instances cross NUMA nodes or L3s."""


@record(kw_only=False)
class WorkerCpus:
    """The place of one worker: its cores, the CPUs it may run on, and how many of them it may fill at a time."""

    cores: tuple[Core, ...]
    cpus: frozenset[int]
    cpu_limit: int

    @property
    def numa_nodes(self) -> frozenset[int]:
        """The NUMA nodes of its cores."""
        return frozenset(core.numa_node for core in self.cores)


@record
class Placement:
    """The CPUs of every worker, in order. `exclusive`: no two workers share a CPU."""

    workers: tuple[WorkerCpus, ...]
    exclusive: bool
    reason: str
    warnings: tuple[str, ...] = ()


@record(kw_only=False)
class _Rule:
    """What instances may not cross, how large they may be, and what they may cross although they fit inside it."""

    region: Region
    largest: int
    crosses: str | None


def worker_cpus(cores: Iterable[Core]) -> WorkerCpus:
    """The CPUs of a worker that is pinned to these cores."""
    kept = tuple(cores)
    cpus = frozenset(cpu for core in kept for cpu in core.cpus)
    return WorkerCpus(kept, cpus, len(cpus))


def whole_cores(cores: Iterable[Core], cpu_limit: int) -> WorkerCpus:
    """The CPUs of a worker that may run on every logical CPU of these cores, on `cpu_limit` of them at a time."""
    kept = tuple(cores)
    cpus = frozenset(cpu for core in kept for cpu in core.allowed)
    return WorkerCpus(kept, cpus, min(cpu_limit, len(cpus)))


def in_order(pool: Pool) -> tuple[Core, ...]:
    """The pool's cores, NUMA node after NUMA node."""
    return tuple(sorted(pool.cores, key=lambda core: (core.numa_node, core.cpus[0])))


def place(pool: Pool, settings: Settings) -> Placement:
    """The CPUs of all instances that the settings request, pinned to cores.

    Raises: UsageError if they do not fit.
    """
    cores = in_order(pool)
    if settings.instances is None and settings.cores_per_instance is None:
        return Placement(workers=(worker_cpus(cores),), exclusive=True, reason="one worker over the whole pool")
    check_size(settings, f"the pool has {len(cores)}", len(cores))
    if settings.instances == "auto" and settings.cores_per_instance is None:
        return _one_per_node(cores)
    count = instance_count(settings, pool)
    if settings.cores_per_instance is None:
        return _divide(cores, count, settings)
    return _fixed_size(cores, count, settings.cores_per_instance, settings)


def instance_count(settings: Settings, pool: Pool) -> int | None:
    """How many instances were asked for; None: as many as fit. Raises: UsageError if there are too few cores."""
    if settings.instances == "auto":
        return len({core.numa_node for core in pool.cores})
    count, size = settings.instances, settings.cores_per_instance or 1
    if count is None or settings.oversubscribe or count * size <= len(pool.cores):
        return count
    if settings.cores_per_instance is None:
        what, value = "more instances than cores", f"{count} instances on {len(pool.cores)}"
    else:
        what = "more cores asked for than there are"
        value = f"{count} instances of {size} cores are {count * size}, the pool has {len(pool.cores)}"
    raise UsageError(
        what, value=value, source=pool.source, hint="fewer or smaller instances, or --oversubscribe to share cores"
    )


def check_size(settings: Settings, have: str, cores: int) -> None:
    """Raises: UsageError if one instance alone is larger than `cores`, which `have` puts into words."""
    size = settings.cores_per_instance
    if size is not None and size > cores:
        raise UsageError(
            "an instance larger than what there is",
            value=f"{size} cores per instance, {have}",
            source="--cores-per-instance",
            hint=f"--cores-per-instance {cores} or less",
        )


def _one_per_node(cores: tuple[Core, ...]) -> Placement:
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core)
    return Placement(
        workers=tuple(worker_cpus(members) for members in nodes.values()),
        exclusive=True,
        reason="one instance per NUMA node with CPUs in the pool",
    )


def _rules(cores: tuple[Core, ...]) -> Iterator[_Rule]:
    """From the strictest to none: stay inside a NUMA node, cross its L3s, span NUMA nodes, cross them, cross all."""
    outer = outermost(cores)
    whole = region_of(cores, (outer, by_node, by_l3))
    nodes = [core.numa_node for core in cores]
    largest = max(nodes.count(node) for node in set(nodes))
    beyond = "sockets" if largest == len(cores) else "NUMA nodes"
    yield _Rule(whole, largest, None)
    yield _Rule(region_of(cores, (outer, by_node)), largest, "L3 caches")
    yield _Rule(whole, len(cores), beyond)
    yield _Rule(region_of(cores, (outer,)), len(cores), beyond)
    yield _Rule(Region(whole.cores), len(cores), "sockets")


def _divide(cores: tuple[Core, ...], count: int | None, settings: Settings) -> Placement:
    """`count` instances of equal size up to one core; more than there are cores share (--oversubscribe)."""
    if count is None or count > len(cores):
        return _fixed_size(cores, count, 1, settings)
    return divide(cores, count, spread=settings.strategy == "spread", grow=True)


def divide(cores: tuple[Core, ...], count: int, *, spread: bool, grow: bool, noun: str = "instances") -> Placement:
    """`count` workers as large as the first tolerable rule allows; `grow`: the first take left-over cores, one each.

    `cores` are in order of their NUMA nodes and at least `count`.
    """
    strictest_idle = 0
    for rule in _rules(cores):
        size = _largest_size(rule, count, len(cores))
        workers = _cut(rule.region, size, count, grow=grow, spread=spread)
        idle = len(cores) - sum(len(placed.cores) for placed in workers)
        strictest_idle = strictest_idle or idle
        largest = not grow and size == len(cores) // count
        if largest or idle * TOLERATED_IDLE <= len(cores):
            break
    return Placement(
        workers=workers,
        exclusive=True,
        reason=_division_reason(count, idle, len(cores)),
        warnings=_crossing(rule, f"inside them {strictest_idle} of {len(cores)} cores would idle", noun),
    )


def _largest_size(rule: _Rule, count: int, cores: int) -> int:
    for size in range(min(rule.largest, cores // count), 1, -1):
        if capacity(rule.region, size) >= count:
            return size
    return 1


def _cut(region: Region, size: int, count: int, *, grow: bool, spread: bool) -> tuple[WorkerCpus, ...]:
    """The CPUs of `count` instances; with `grow` the first of a region take its left-over cores, one each."""
    workers: list[WorkerCpus] = []
    for part, share in deal(region, size, count, spread=spread):
        extra = len(part.cores) - share * size if grow else 0
        start = 0
        for index in range(share):
            end = start + size + (1 if index < extra else 0)
            workers.append(worker_cpus(part.cores[start:end]))
            start = end
    return tuple(workers)


def _fixed_size(cores: tuple[Core, ...], count: int | None, size: int, settings: Settings) -> Placement:
    """Instances of exactly `size` cores: `count`, or as many as fit; more than fit share (--oversubscribe)."""
    rule = _rule_for(cores, count, size)
    room = capacity(rule.region, size)
    wanted = room if count is None else count
    workers = _cut(rule.region, size, min(wanted, room), grow=False, spread=settings.strategy == "spread")
    inside = capacity(next(_rules(cores)).region, size)
    return Placement(
        workers=tuple(workers[index % len(workers)] for index in range(wanted)),
        exclusive=wanted <= room,
        reason=_division_reason(wanted, max(0, len(cores) - wanted * size), len(cores)),
        warnings=_crossing(rule, f"{inside} of {size} cores fit inside them"),
    )


def _rule_for(cores: tuple[Core, ...], count: int | None, size: int) -> _Rule:
    """The strictest rule that places all instances, or without a count idles no more than is tolerable."""
    rules = tuple(_rules(cores))
    best = rules[0]
    for rule in rules:
        room = capacity(rule.region, size)
        if room > capacity(best.region, size):
            best = rule
        if room >= count if count is not None else (len(cores) - room * size) * TOLERATED_IDLE <= len(cores):
            return best
    return best


def _crossing(rule: _Rule, why: str, noun: str = "instances") -> tuple[str, ...]:
    return () if rule.crosses is None else (f"{noun} cross {rule.crosses}: {why}",)


def _division_reason(count: int, idle: int, cores: int) -> str:
    return f"{count} on {cores} cores" + (f", {idle} idle" if idle else "")
