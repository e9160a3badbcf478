"""Which cores a launch may give out: the budget, narrowed by what was asked and by what would slow a worker."""

from __future__ import annotations

from cpulaunch.records.cpulist import format_cpulist
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
    """One core of the pool: the logical CPUs given out, and all of its CPUs that may be used.

    `l3` and `numa_node` are -1 and 0 where the machine does not say: one group for all such cores.
    """

    cpus: tuple[int, ...]
    allowed: tuple[int, ...]
    socket: int
    numa_node: int
    l3: int


@record
class Pool:
    """The cores to give out. `pinned` False: a CPU quota gives no right to particular CPUs.

    `quota_threads`: threads the quota pays for, all workers together; None if it limits nothing. `source`: what the
    pool is and who made it so small, for error messages.
    """

    cores: tuple[Core, ...]
    pinned: bool
    quota_threads: int | None
    source: str
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]


def select_pool(host: Host, request: LaunchRequest) -> Pool:
    """The pool of a request on a host.

    Raises: UsageError if CPUs or NUMA nodes were asked for that are not there or not ours.
    """
    online = {cpu.id: cpu for cpu in host.cpus}
    budget = host.limits.budget.cpus.intersection(online)
    if not budget:
        raise UsageError(
            "none of the CPUs this process may use is online",
            value=format_cpulist(host.limits.budget.cpus) or "none",
            source=host.limits.budget.limited_by,
            hint="cpulaunch probe shows the machine and its limits",
        )
    asked = _restrict(host, request, budget)
    chosen, passed_over, warnings = _without_slow(host, request, asked)
    cores = _cores((online[id_] for id_ in chosen), smt=request.settings.smt)
    pinned = _pinned(host, request, budget)
    return Pool(
        cores=cores,
        pinned=pinned,
        quota_threads=_quota_threads(host, cores),
        source=_source(host, request, chosen),
        notes=_notes(host, request, cores, passed_over=passed_over, pinned=pinned),
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
            "none of the CPUs asked for is on the NUMA nodes asked for",
            value=f"CPUs {format_cpulist(settings.cpus or ())}, NUMA nodes {format_cpulist(settings.numa_nodes or ())}",
            source="--cpus, --numa-nodes",
            hint="leave one of the two out",
        )
    return cpus


def _check_cpus(host: Host, asked: frozenset[int], budget: frozenset[int]) -> None:
    missing = asked - budget
    if not missing:
        return
    online = {cpu.id for cpu in host.cpus}
    absent = missing - online - host.offline_cpus
    offline = missing & host.offline_cpus
    what = "CPUs that do not exist" if absent else "CPUs that are offline" if offline else "CPUs outside the budget"
    limits = host.limits.budget
    raise UsageError(
        what,
        value=format_cpulist(absent or offline or missing),
        source="--cpus",
        hint=f"--cpus may name {format_cpulist(budget)} ({limits.limited_by})",
    )


def _check_node(host: Host, node: int, budget: frozenset[int]) -> None:
    members = {cpu.id for cpu in host.cpus if (cpu.numa_node or 0) == node}
    known = {entry.id for entry in host.numa_nodes} | {cpu.numa_node or 0 for cpu in host.cpus}
    usable = sorted({cpu.numa_node or 0 for cpu in host.cpus if cpu.id in budget})
    hint = f"--numa-nodes may name {format_cpulist(usable)}"
    if node not in known:
        raise UsageError("NUMA node that does not exist", value=node, source="--numa-nodes", hint=hint)
    if not members:
        raise UsageError("NUMA node without CPUs", value=node, source="--numa-nodes", hint=hint)
    if not members & budget:
        raise UsageError(
            "NUMA node outside the budget",
            value=node,
            source="--numa-nodes",
            hint=f"{hint} ({host.limits.budget.limited_by})",
        )


def _without_slow(
    host: Host, request: LaunchRequest, asked: frozenset[int]
) -> tuple[frozenset[int], tuple[str, ...], tuple[str, ...]]:
    """CPUs without those that would slow a worker, unless nothing else is left; and what was passed over."""
    if request.settings.cpus is not None:
        return asked, (), ()
    chosen, passed_over, warnings = asked, [], []
    isolated = host.kernel.isolated_cpus & chosen
    if isolated and isolated != chosen:
        chosen -= isolated
        passed_over.append(f"isolated CPUs {format_cpulist(isolated)}")
    slow = frozenset(cpu.id for cpu in host.cpus if cpu.kind == "efficiency") & chosen
    if slow and slow != chosen and not request.settings.e_cores:
        chosen -= slow
        passed_over.append(f"efficiency cores (CPUs {format_cpulist(slow)})")
    empty_nodes = frozenset(node.id for node in host.numa_nodes if node.memory_bytes == 0)
    remote = frozenset(cpu.id for cpu in host.cpus if cpu.numa_node in empty_nodes) & chosen
    if remote and remote != chosen and request.settings.numa_nodes is None:
        chosen -= remote
        nodes = format_cpulist(node.id for node in host.numa_nodes if node.memory_bytes == 0 and node.cpus & remote)
        warnings.append(f"CPUs {format_cpulist(remote)} are not used: NUMA node {nodes} has no memory (--cpus asks)")
    return chosen, tuple(passed_over), tuple(warnings)


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
            l3=-1 if group[0].l3 is None else group[0].l3,
        )
        for group in siblings.values()
    )


def _pinned(host: Host, request: LaunchRequest, budget: frozenset[int]) -> bool:
    """Whether the budget's CPUs are ours: not if only a quota below the machine's size limits us."""
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
    """A warning if a cpuset holds some siblings of a core and other processes may run on the rest."""
    if host.limits.cpuset is None:
        return ()
    cores = {online[id_].core for id_ in chosen}
    foreign = frozenset(id_ for id_, cpu in online.items() if cpu.core in cores) - host.limits.cpuset
    if not foreign:
        return ()
    return (
        f"the cpuset holds single SMT siblings: CPUs {format_cpulist(foreign)} share cores with ours "
        "and belong to others, so speed will vary",
    )


def _source(host: Host, request: LaunchRequest, chosen: frozenset[int]) -> str:
    asked = [flag for flag, name in (("--cpus", "cpus"), ("--numa-nodes", "numa_nodes")) if name in request.origins]
    return f"CPUs {format_cpulist(chosen)}: {', '.join(asked) or host.limits.budget.limited_by}"


def _notes(
    host: Host, request: LaunchRequest, cores: tuple[Core, ...], *, passed_over: tuple[str, ...], pinned: bool
) -> tuple[Note, ...]:
    settings = request.settings
    origin = "cli" if settings.cpus is not None or settings.numa_nodes is not None else "default"
    cpus = frozenset(cpu for core in cores for cpu in core.cpus)
    left = frozenset(cpu for core in cores for cpu in core.allowed) - cpus
    parts = [f"the budget is {format_cpulist(host.limits.budget.cpus)}: {host.limits.budget.limited_by}"]
    if left:
        parts.append(f"one logical CPU per core, siblings {format_cpulist(left)} stay free (--smt uses them)")
    if passed_over:
        parts.append("not used: " + ", ".join(passed_over))
    if not pinned:
        parts.append("a CPU quota gives no right to particular CPUs, so workers are not pinned to single cores")
    return (Note(setting="pool", value=format_cpulist(cpus), origin=origin, reason="; ".join(parts)),)
