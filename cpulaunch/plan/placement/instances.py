"""Which cores each instance gets.

An instance stays inside an L3 cache, NUMA node and socket that it fits inside, and instances differ by at most one
core. Only where that would idle more than a quarter of the pool do instances cross NUMA nodes or caches, and a warning
says so.
"""

from __future__ import annotations

from cpulaunch.plan.placement.pool import Core, Pool
from cpulaunch.plan.placement.regions import Region, by_l3, by_node, capacity, deal, groups, outermost, region_of
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import count_text
from cpulaunch.records.plan import JobPlan, Note, VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TOLERATED_IDLE = 4
"""One part in this many of the pool may idle before instances cross NUMA nodes or L3 caches."""


@record(kw_only=False)
class WorkerCpus:
    """The cores of one worker, the CPUs it may run on, and how many of these may be busy at a time."""

    cores: tuple[Core, ...]
    cpus: frozenset[int]
    cpu_limit: int

    @property
    def numa_nodes(self) -> frozenset[int]:
        """The NUMA nodes of the worker's cores."""
        return frozenset(core.numa_node for core in self.cores)


@record
class Placement:
    """The CPUs of every worker, in order. `exclusive`: no two workers share a CPU."""

    workers: tuple[WorkerCpus, ...]
    exclusive: bool
    reason: str
    warnings: tuple[str, ...] = ()


@record
class HostWorkers:
    """The workers of this host, in order: instances, or the ranks of a job by local rank. `started`: those to start.

    Ranks have numbers in the job (`global_ranks`: None where the hosts must meet first), GPUs, and `variables` that
    identify each of them. `job`: None for instances.
    """

    placement: Placement
    started: tuple[int, ...]
    world_size: int
    global_ranks: tuple[int | None, ...]
    gpus: tuple[int | None, ...]
    variables: tuple[tuple[tuple[str, str | None], ...], ...]
    grace_seconds: float
    show: frozenset[int] | None
    job: JobPlan | None = None
    variable_requests: tuple[VariableRequest, ...] = ()
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()


@record(kw_only=False)
class _Rule:
    """The regions that no instance crosses and the largest size allowed.

    `crosses`: what instances then cross although they fit inside it; None if nothing.
    """

    region: Region
    largest: int
    crosses: str | None


def worker_cpus(cores: Iterable[Core]) -> WorkerCpus:
    """The CPUs of a worker that is pinned to these cores."""
    own = tuple(cores)
    cpus = frozenset(cpu for core in own for cpu in core.cpus)
    return WorkerCpus(own, cpus, len(cpus))


def whole_cores(cores: Iterable[Core], cpu_limit: int) -> WorkerCpus:
    """The CPUs of a worker that may run on every logical CPU of these cores, on `cpu_limit` of them at a time."""
    kept = tuple(cores)
    cpus = frozenset(cpu for core in kept for cpu in core.allowed)
    return WorkerCpus(kept, cpus, min(cpu_limit, len(cpus)))


def ordered_cores(pool: Pool) -> tuple[Core, ...]:
    """The pool's cores, NUMA node after NUMA node."""
    return tuple(sorted(pool.cores, key=lambda core: (core.numa_node, core.cpus[0])))


def place(pool: Pool, settings: Settings) -> Placement:
    """The CPUs of all requested instances, pinned to cores.

    Raises: UsageError if they do not fit.
    """
    cores = ordered_cores(pool)
    if settings.instances is None and settings.cores_per_instance is None:
        return Placement(workers=(worker_cpus(cores),), exclusive=True, reason="one worker on all usable cores")
    check_size(settings, len(cores), f"the {count_text(len(cores), 'core')} available", source=pool.source)
    if settings.instances == "auto" and settings.cores_per_instance is None:
        return Placement(
            workers=tuple(worker_cpus(node) for node in groups(cores, lambda core: core.numa_node)),
            exclusive=True,
            reason="one instance per NUMA node that has usable CPUs",
        )
    instances = instance_count(settings, pool)
    if settings.cores_per_instance is not None:
        return _place_of_size(cores, settings.cores_per_instance, instances, settings)
    if instances is None or instances > len(cores):  # More than there are cores: with --oversubscribe they share.
        return _place_of_size(cores, 1, instances, settings)
    return divide(cores, instances, spread=settings.strategy == "spread", uneven=True)


def instance_count(settings: Settings, pool: Pool) -> int | None:
    """The number of instances requested; None: as many as fit.

    Raises: UsageError if the pool has too few cores for them.
    """
    if settings.instances == "auto":
        return len({core.numa_node for core in pool.cores})
    instances, size = settings.instances, settings.cores_per_instance or 1
    if instances is None or settings.oversubscribe or instances * size <= len(pool.cores):
        return instances
    each = "" if settings.cores_per_instance is None else f" of {count_text(size, 'core')}"
    raise UsageError(
        f"{count_text(instances, 'instance')}{each} need {count_text(instances * size, 'core')}",
        value="1 is available" if len(pool.cores) == 1 else f"{len(pool.cores):,} are available",
        source=pool.source,
        hint="use fewer or smaller instances, or --oversubscribe to let them share cores",
    )


def check_size(settings: Settings, cores: int, limit: str, *, source: str) -> None:
    """Raises: UsageError if one instance needs more than `cores`; `limit` and `source` say what limits it to them."""
    size = settings.cores_per_instance
    if size is not None and size > cores:
        raise UsageError(
            f"--cores-per-instance {size} exceeds {limit}",
            source=source,
            hint=f"use --cores-per-instance {cores} or less",
        )


def divide(cores: tuple[Core, ...], count: int, *, spread: bool, uneven: bool, noun: str = "instance") -> Placement:
    """The CPUs of `count` workers, as large as the first tolerable rule allows.

    `cores` are in order of their NUMA nodes and at least `count`. `uneven`: the first workers of a region take its
    left-over cores, one each.
    """
    strictest_idle = 0
    for rule in _rules(cores):
        size = _largest_size(rule, count, len(cores))
        workers = _cut(rule.region, size, count, uneven=uneven, spread=spread)
        idle = len(cores) - sum(len(worker.cores) for worker in workers)
        strictest_idle = strictest_idle or idle
        largest = not uneven and size == len(cores) // count
        if largest or idle * TOLERATED_IDLE <= len(cores):
            break
    why = f"keeping each inside one would leave {strictest_idle} of {count_text(len(cores), 'core')} idle"
    return Placement(
        workers=workers,
        exclusive=True,
        reason=_division_reason(count, _idle_cores(cores, workers), len(cores), noun),
        warnings=_crossing(rule, noun, why),
    )


def _rules(cores: tuple[Core, ...]) -> Iterator[_Rule]:
    """From the strictest to none: stay inside a NUMA node, cross its L3s, span NUMA nodes, cross them, cross all."""
    outer = outermost(cores)
    nested = region_of(cores, (outer, by_node, by_l3))
    nodes = [core.numa_node for core in cores]
    largest = max(nodes.count(node) for node in set(nodes))
    beyond = "sockets" if largest == len(cores) else "NUMA nodes"
    yield _Rule(nested, largest, None)
    yield _Rule(region_of(cores, (outer, by_node)), largest, "L3 caches")
    yield _Rule(nested, len(cores), beyond)
    yield _Rule(region_of(cores, (outer,)), len(cores), beyond)
    yield _Rule(Region(nested.cores), len(cores), "sockets")


def _largest_size(rule: _Rule, count: int, cores: int) -> int:
    """The most cores per worker with which `count` workers fit under a rule, at least 1."""
    for size in range(min(rule.largest, cores // count), 1, -1):
        if capacity(rule.region, size) >= count:
            return size
    return 1


def _cut(region: Region, size: int, count: int, *, uneven: bool, spread: bool) -> tuple[WorkerCpus, ...]:
    """The CPUs of `count` workers cut out of a region; `uneven`: the first ones take left-over cores, one each."""
    workers: list[WorkerCpus] = []
    for part, share in deal(region, size, count, spread=spread):
        extra = len(part.cores) - share * size if uneven else 0
        start = 0
        for index in range(share):
            end = start + size + (1 if index < extra else 0)
            workers.append(worker_cpus(part.cores[start:end]))
            start = end
    return tuple(workers)


def _place_of_size(cores: tuple[Core, ...], size: int, count: int | None, settings: Settings) -> Placement:
    """Instances of exactly `size` cores: `count`, or as many as fit; more than fit share cores (--oversubscribe)."""
    rule = _rule_for(cores, count, size)
    fitting = capacity(rule.region, size)
    instances = fitting if count is None else count
    spread = settings.strategy == "spread"
    workers = _cut(rule.region, size, min(instances, fitting), uneven=False, spread=spread)
    inside = capacity(next(_rules(cores)).region, size)
    kept = f"only {count_text(inside, 'instance')}" if inside else "no instance"
    return Placement(
        workers=tuple(workers[index % len(workers)] for index in range(instances)),
        exclusive=instances <= fitting,
        reason=_division_reason(instances, _idle_cores(cores, workers), len(cores), "instance"),
        warnings=_crossing(rule, "instance", f"otherwise {kept} of {count_text(size, 'core')} would fit"),
    )


def _rule_for(cores: tuple[Core, ...], count: int | None, size: int) -> _Rule:
    """The strictest rule under which all instances fit; without a count, one that idles no more than is tolerable."""
    rules = tuple(_rules(cores))
    best = rules[0]
    for rule in rules:
        fitting = capacity(rule.region, size)
        if fitting > capacity(best.region, size):
            best = rule
        if fitting >= count if count is not None else (len(cores) - fitting * size) * TOLERATED_IDLE <= len(cores):
            return best
    return best


def _crossing(rule: _Rule, noun: str, why: str) -> tuple[str, ...]:
    return () if rule.crosses is None else (f"{noun}s cross {rule.crosses}: {why}",)


def _idle_cores(cores: tuple[Core, ...], workers: Iterable[WorkerCpus]) -> tuple[Core, ...]:
    used = {core.cpus[0] for worker in workers for core in worker.cores}
    return tuple(core for core in cores if core.cpus[0] not in used)


def _division_reason(count: int, idle: tuple[Core, ...], cores: int, noun: str) -> str:
    text = f"{count_text(count, noun)} on {count_text(cores, 'core')}"
    if not idle:
        return text
    return f"{text}, {len(idle)} idle (CPUs {format_cpulist(frozenset(cpu for core in idle for cpu in core.cpus))})"
