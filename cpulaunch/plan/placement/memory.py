"""The memory of each worker: its own NUMA nodes, or the nearest one where its own cannot be used.

A NUMA node cannot be used if it has no CPUs, no memory, or is outside the memory nodes of the cpuset. Workers are on
such nodes only if --cpus, --numa-nodes or a cpuset put them there: the pool (pool.py) leaves out CPUs without memory.
"""

from cpulaunch.plan.placement.instances import WorkerCpus
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import MemoryPolicy


@record
class Memory:
    """The memory policy and NUMA nodes of every worker, in order."""

    policies: tuple[MemoryPolicy, ...]
    nodes: tuple[frozenset[int], ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()


def place_memory(host: Host, request: LaunchRequest, workers: tuple[WorkerCpus, ...]) -> Memory:
    """The memory policy and NUMA nodes of every worker."""
    usable = _usable_nodes(host)
    homes: dict[frozenset[int], frozenset[int]] = {}
    for worker in workers:
        if (own := worker.numa_nodes) not in homes:
            homes[own] = (own & usable) or _nearest(host, own, usable)
    nodes = tuple(homes[worker.numa_nodes] for worker in workers)
    unset, warnings = _unset_reason(host, request, usable)
    policies = tuple(_policy(request, home) for home in nodes) if unset is None else _NO_POLICY * len(workers)
    reason = unset or _reason(request, policies)
    value = ", ".join(sorted(set(policies)))
    origin = request.origin("membind")
    return Memory(
        policies=policies,
        nodes=nodes,
        notes=(Note(setting="membind", value=value, origin=origin, reason=reason),),
        warnings=warnings,
    )


_NO_POLICY: tuple[MemoryPolicy, ...] = ("none",)
_NO_BINDING = "this operating system does not let a process choose where its memory goes"


def check_binder(request: LaunchRequest) -> None:
    """Raises: UsageError if --membind needs a binder that can set a memory policy."""
    settings = request.settings
    requested = request.origin("membind") == "cli" and settings.membind not in (None, "none")
    if requested and settings.binder in ("taskset", "none"):
        raise UsageError(
            f"--membind {settings.membind} needs a binder that sets memory policies",
            value=f"--binder {settings.binder} does not",
            source="command line",
            hint="use --binder native (the default) or numactl",
        )


def memory_budget(host: Host) -> int | None:
    """Memory that all workers together may use, in bytes; None if neither the machine nor a limit gives a size."""
    return min((size for size in (host.limits.memory_bytes, host.memory_bytes) if size), default=None)


def _usable_nodes(host: Host) -> frozenset[int]:
    """NUMA nodes with CPUs and memory that this process may allocate on."""
    allowed = host.limits.memory_nodes
    return frozenset(
        node.id
        for node in host.numa_nodes
        if node.cpus and node.memory_bytes != 0 and (allowed is None or node.id in allowed)
    )


def _nearest(host: Host, own: frozenset[int], usable: frozenset[int]) -> frozenset[int]:
    """The usable NUMA node nearest to these, of which none can be used; empty if the machine gives no distances."""
    distances = [
        (distance, other)
        for node in host.numa_nodes
        if node.id in own
        for other, distance in node.distances
        if other in usable
    ]
    return frozenset((min(distances)[1],)) if distances else frozenset()


def _unset_reason(host: Host, request: LaunchRequest, usable: frozenset[int]) -> tuple[str | None, tuple[str, ...]]:
    """Why no policy is set (None: one is), and the warnings."""
    settings = request.settings
    if not host.can_bind or settings.binder in ("taskset", "none"):
        return f"binder {settings.binder} sets no memory policy" if host.can_bind else _NO_BINDING, ()
    if settings.membind == "none":
        return request.reasons.get("membind", "pages go to the NUMA node that touches them first"), ()
    if not usable:
        why = "the kernel reports no NUMA node with both CPUs and memory"
        return why, () if settings.membind is None else (f"--membind {settings.membind} is not applied: {why}",)
    if settings.membind is None and len(usable) == 1:
        return "only one NUMA node has CPUs and memory", ()
    if host.kernel.mempolicy == "denied":
        return "set_mempolicy is not permitted here: pages go to the NUMA node that touches them first", (
            "memory policy not set: this container may not call set_mempolicy "
            "(give it CAP_SYS_NICE or a seccomp profile that allows the call); the CPUs are bound anyway",
        )
    return None, ()


def _policy(request: LaunchRequest, home: frozenset[int]) -> MemoryPolicy:
    if not home:
        return "none"
    if request.settings.membind is not None:
        return request.settings.membind
    return "interleave" if len(home) > 1 else "preferred"


def _reason(request: LaunchRequest, policies: tuple[MemoryPolicy, ...]) -> str:
    if request.settings.membind is not None:
        return request.reasons.get("membind", "requested")
    if "interleave" in policies:
        return "workers that span NUMA nodes spread their pages over them, to use the bandwidth of all"
    return "pages come from the worker's own NUMA node, and from another only when that one is full"
