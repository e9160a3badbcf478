"""Which cores a launch may use: the budget, less what the user excludes and what would slow a worker."""

from __future__ import annotations

from cpulaunch.records.cpulist import cpus_are, cpus_text, format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, LogicalCpu
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@record(kw_only=False)
class Core:
    """One core of the pool: the logical CPUs given to workers, and all of its CPUs that they may use.

    Where the machine does not say, `l3` is None and `numa_node` 0: all such cores are one group.
    """

    cpus: tuple[int, ...]
    allowed: tuple[int, ...]
    socket: int
    numa_node: int
    l3: int | None


@record
class Pool:
    """The cores to divide among workers. `pinned` False: a CPU quota does not reserve particular CPUs.

    `quota_threads`: threads that the quota allows all workers together; None if it limits nothing. `source`: the
    CPUs of the pool and what limits it to them, for error messages.
    """

    cores: tuple[Core, ...]
    pinned: bool
    quota_threads: int | None
    source: str
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]


def select_pool(host: Host, request: LaunchRequest) -> Pool:
    """The pool of a request on a host.

    Raises: UsageError if requested CPUs or NUMA nodes do not exist or are outside the budget.
    """
    online = {cpu.id: cpu for cpu in host.cpus}
    budget = host.limits.budget.cpus.intersection(online)
    if not budget:
        raise UsageError(
            "no CPU that this process may use is online",
            value=format_cpulist(host.limits.budget.cpus) or "none",
            source=host.limits.budget.limited_by,
            hint="cpulaunch probe shows the machine and its limits",
        )
    requested = _restrict(host, request, budget)
    chosen, skipped, warnings = _without_slow(host, request, requested)
    cores = _cores((online[id_] for id_ in chosen), smt=request.settings.smt)
    pinned = _pinned(host, request, budget)
    return Pool(
        cores=cores,
        pinned=pinned,
        quota_threads=_quota_threads(host, cores),
        source=_source(host, request, chosen),
        notes=_notes(host, request, cores, skipped=skipped, pinned=pinned),
        warnings=(*warnings, *_partial_cores(host, online, chosen)),
    )


def _restrict(host: Host, request: LaunchRequest, budget: frozenset[int]) -> frozenset[int]:
    """The budget's CPUs that --cpus and --numa-nodes leave."""
    settings = request.settings
    cpus = budget
    if settings.cpus is not None:
        _check_cpus(host, settings.cpus, budget)
        cpus = settings.cpus
    if settings.numa_nodes is not None:
        for node in sorted(settings.numa_nodes):
            _check_node(host, node, budget)
        cpus &= frozenset(cpu.id for cpu in host.cpus if (cpu.numa_node or 0) in settings.numa_nodes)
    if not cpus:
        raise UsageError(
            f"--cpus {format_cpulist(settings.cpus or ())} and --numa-nodes "
            f"{format_cpulist(settings.numa_nodes or ())} have no CPU in common",
            hint="drop one of them",
        )
    return cpus


def _check_cpus(host: Host, requested: frozenset[int], budget: frozenset[int]) -> None:
    missing = requested - budget
    if not missing:
        return
    online = {cpu.id for cpu in host.cpus}
    absent = missing - online - host.offline_cpus
    offline = missing & host.offline_cpus
    if absent:
        what = f"{cpus_text(absent)} do{'es' * (len(absent) == 1)} not exist"
    elif offline:
        what = f"{cpus_are(offline)} offline"
    else:
        what = f"{cpus_are(missing)} not available to this process"
    limits = host.limits.budget
    raise UsageError(
        what,
        source="--cpus",
        hint=f"choose from {cpus_text(budget)} ({limits.limited_by})",
    )


def _check_node(host: Host, node: int, budget: frozenset[int]) -> None:
    members = {cpu.id for cpu in host.cpus if (cpu.numa_node or 0) == node}
    known = {entry.id for entry in host.numa_nodes} | {cpu.numa_node or 0 for cpu in host.cpus}
    usable = sorted({cpu.numa_node or 0 for cpu in host.cpus if cpu.id in budget})
    hint = f"choose from NUMA node{'s' * (len(usable) != 1)} {format_cpulist(usable)}"
    if node not in known:
        raise UsageError(f"NUMA node {node} does not exist", source="--numa-nodes", hint=hint)
    if not members:
        raise UsageError(f"NUMA node {node} has no CPUs", source="--numa-nodes", hint=hint)
    if not members & budget:
        raise UsageError(
            f"the CPUs of NUMA node {node} are not available to this process",
            source="--numa-nodes",
            hint=f"{hint} ({host.limits.budget.limited_by})",
        )


def _without_slow(
    host: Host, request: LaunchRequest, requested: frozenset[int]
) -> tuple[frozenset[int], tuple[str, ...], tuple[str, ...]]:
    """CPUs without those that would slow a worker, unless nothing else is left; which are skipped; and warnings."""
    if request.settings.cpus is not None:
        return requested, (), ()
    chosen, skipped, warnings = requested, [], []
    isolated = host.kernel.isolated_cpus & chosen
    if isolated and isolated != chosen:
        chosen -= isolated
        skipped.append(f"isolated {cpus_text(isolated)}")
    slow = _efficiency_cpus(host, request, chosen)
    if slow:
        chosen -= slow
        skipped.append(f"efficiency cores ({cpus_text(slow)})")
    empty_nodes = frozenset(node.id for node in host.numa_nodes if node.memory_bytes == 0)
    remote = frozenset(cpu.id for cpu in host.cpus if cpu.numa_node in empty_nodes) & chosen
    if remote and remote != chosen and request.settings.numa_nodes is None:
        chosen -= remote
        without = [node.id for node in host.numa_nodes if node.memory_bytes == 0 and node.cpus & remote]
        nodes = f"NUMA node{'s' * (len(without) > 1)} {format_cpulist(without)}"
        warnings.append(f"{cpus_are(remote)} not used: {nodes} without memory (--cpus overrides this)")
    return chosen, tuple(skipped), tuple(warnings)


def _efficiency_cpus(host: Host, request: LaunchRequest, chosen: frozenset[int]) -> frozenset[int]:
    """Those of the chosen CPUs that are left out as efficiency cores.

    None beside a single performance core (Lakefield), which alone is slower than all, unless the user leaves them out.
    """
    slow = _efficient(host) & chosen
    fast_cores = {cpu.core for cpu in host.cpus if cpu.id in chosen - slow}
    required = 1 if request.origin("e_cores") == "cli" else 2
    return slow if len(fast_cores) >= required and not request.settings.e_cores else frozenset()


def _kept_efficiency_cpus(host: Host, request: LaunchRequest, chosen: frozenset[int]) -> frozenset[int]:
    """The efficiency CPUs of a pool with performance cores that neither --cpus nor --e-cores asked for."""
    slow = _efficient(host) & chosen
    asked = request.settings.e_cores or request.settings.cpus is not None
    return frozenset() if asked or slow == chosen else slow


def _efficient(host: Host) -> frozenset[int]:
    return frozenset(cpu.id for cpu in host.cpus if cpu.kind == "efficiency")


def _cores(cpus: Iterable[LogicalCpu], *, smt: bool) -> tuple[Core, ...]:
    """The cores of these CPUs in order of their lowest CPU, each with one logical CPU or (smt) all of them."""
    siblings: dict[int, list[LogicalCpu]] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        siblings.setdefault(cpu.core, []).append(cpu)
    return tuple(
        Core(
            cpus=tuple(cpu.id for cpu in group) if smt else (group[0].id,),
            allowed=tuple(cpu.id for cpu in group),
            socket=group[0].socket,
            numa_node=group[0].numa_node or 0,
            l3=group[0].l3,
        )
        for group in siblings.values()
    )


def _pinned(host: Host, request: LaunchRequest, budget: frozenset[int]) -> bool:
    """Whether the launch may pin workers to the budget's CPUs: not if the only limit is a quota below their number."""
    quota = host.limits.quota
    if quota is None or request.settings.cpus is not None or len(budget) < len(host.cpus):
        return True
    return quota.cpus >= len(budget)


def _quota_threads(host: Host, cores: tuple[Core, ...]) -> int | None:
    quota = host.limits.quota
    if quota is None or quota.cpus >= sum(len(core.cpus) for core in cores):
        return None
    return quota.threads


def _partial_cores(host: Host, online: dict[int, LogicalCpu], chosen: frozenset[int]) -> tuple[str, ...]:
    """A warning if the cpuset holds only some siblings of a core, so that other processes may run on the rest."""
    if host.limits.cpuset is None:
        return ()
    cores = {online[id_].core for id_ in chosen}
    foreign = frozenset(id_ for id_, cpu in online.items() if cpu.core in cores) - host.limits.cpuset
    if not foreign:
        return ()
    return (
        f"the cpuset holds only some SMT siblings of its cores: other processes may run on {cpus_text(foreign)}, "
        "so speed will vary",
    )


def _source(host: Host, request: LaunchRequest, chosen: frozenset[int]) -> str:
    flags = [flag for flag, name in (("--cpus", "cpus"), ("--numa-nodes", "numa_nodes")) if name in request.origins]
    return f"{cpus_text(chosen)}: {', '.join(flags) or host.limits.budget.limited_by}"


def _notes(
    host: Host, request: LaunchRequest, cores: tuple[Core, ...], *, skipped: tuple[str, ...], pinned: bool
) -> tuple[Note, ...]:
    settings = request.settings
    origin = "cli" if settings.cpus is not None or settings.numa_nodes is not None else "default"
    cpus = frozenset(cpu for core in cores for cpu in core.cpus)
    siblings = frozenset(cpu for core in cores for cpu in core.allowed) - cpus
    parts = [f"usable {cpus_text(host.limits.budget.cpus)}: {host.limits.budget.limited_by}"]
    if siblings:
        parts.append(f"one logical CPU per core; SMT siblings {format_cpulist(siblings)} stay free (--smt uses them)")
    if skipped:
        parts.append("not used: " + ", ".join(skipped))
    if slow := _kept_efficiency_cpus(host, request, cpus):
        parts.append(f"efficiency cores ({cpus_text(slow)}) too: one performance core alone is slower")
    if not pinned:
        parts.append("a CPU quota does not reserve particular CPUs, so workers are not pinned to cores")
    return (Note(setting="pool", value=format_cpulist(cpus), origin=origin, reason="; ".join(parts)),)
