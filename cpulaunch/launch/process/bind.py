"""Binding to CPUs and NUMA memory, tried on this very process before anything starts."""

from __future__ import annotations

import errno
import os

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan, MemoryPolicy, WorkerPlan
from cpulaunch.records.record import record
from cpulaunch.system.mempolicy import (
    MPOL_BIND,
    MPOL_INTERLEAVE,
    MPOL_PREFERRED,
    MPOL_PREFERRED_MANY,
    Policy,
    get_policy,
    set_policy,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

Notify: TypeAlias = "Callable[[str], None]"
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PERMIT_HINT = "in a container, --cap-add SYS_NICE or a seccomp profile that allows set_mempolicy"
ABSENT_HINT = "this kernel has no NUMA memory policies; --membind none says so"
PROBE_HINT = "`cpulaunch probe` shows what this process may use"


@record
class Binding:
    """What one worker is bound to, as this kernel takes it. Empty `cpus`, no `policy`: inherited."""

    cpus: frozenset[int] = frozenset()
    policy: Policy | None = None


UNBOUND = Binding()


def apply_binding(binding: Binding) -> None:
    """Effect: binds the calling thread, and what it makes or executes. Raises: OSError."""
    if binding.policy is not None:
        set_policy(binding.policy)
    if binding.cpus:
        os.sched_setaffinity(0, binding.cpus)


def prepare_bindings(plan: LaunchPlan, *, notify: Notify) -> tuple[Binding, ...]:
    """Each worker's binding, tried out on this process, which is left as it was.

    What the kernel refuses is dropped with one line to `say`. Raises: LaunchError for that if the plan is
    strict, and always for CPUs or NUMA nodes that do not exist or may not be used.
    """
    if plan.launch.binder != "native":
        return (UNBOUND,) * len(plan.workers)
    said: set[str] = set()

    def degrade(what: str, *, why: str, hint: str) -> None:
        if plan.launch.strict:
            raise LaunchError(what, value=why, source="--strict", hint=hint)
        if what not in said:
            said.add(what)
            notify(f"warning: {what}: {why}; {hint}")

    taken: dict[tuple[str, frozenset[int]], Policy | None] = {}
    bindings = []
    cpus, policy = _own_cpus(), _own_policy(plan)
    try:
        for worker in plan.workers:
            wanted = (worker.mempolicy, worker.numa_nodes)
            if wanted not in taken:
                taken[wanted] = _try_policy(worker, degrade)
            bindings.append(Binding(cpus=_try_cpus(worker, degrade), policy=taken[wanted]))
    finally:
        _restore(cpus, policy)
    return tuple(bindings)


Degrade: TypeAlias = "Callable[..., None]"


def _try_cpus(worker: WorkerPlan, degrade: Degrade) -> frozenset[int]:
    """The CPUs this kernel binds the worker to; empty where it binds nothing."""
    if not worker.cpus:
        return frozenset()
    if not hasattr(os, "sched_setaffinity"):
        degrade("workers are not bound to CPUs", why="this system has no call for it", hint="--binder none says so")
        return frozenset()
    try:
        os.sched_setaffinity(0, worker.cpus)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno in REFUSED:
            degrade("workers are not bound to CPUs", why=_reason("sched_setaffinity", error), hint="--binder none")
            return frozenset()
        raise _impossible(worker, f"CPUs {format_cpulist(worker.cpus)}", "sched_setaffinity", error) from None
    got = frozenset(os.sched_getaffinity(0))
    if got != worker.cpus:
        # The kernel intersects with the cpuset without an error.
        lost = format_cpulist(worker.cpus - got)
        degrade(f"worker {worker.index} does not get all its CPUs", why=f"the kernel withholds {lost}", hint=PROBE_HINT)
    return got


def _try_policy(worker: WorkerPlan, degrade: Degrade) -> Policy | None:
    """The first policy this kernel takes of those that mean what the worker wants; None for the inherited one."""
    error: OSError | None = None
    for policy in policies(worker.mempolicy, worker.numa_nodes):
        try:
            set_policy(policy)
        except OSError as refused:
            error = refused
            if refused.errno != errno.EINVAL:
                break
        else:
            return policy
    if error is None:
        return None
    if error.errno in REFUSED:
        hint = ABSENT_HINT if error.errno == errno.ENOSYS else PERMIT_HINT
        degrade("memory is not bound (CPUs are)", why=_reason("set_mempolicy", error), hint=hint)
        return None
    raise _impossible(worker, f"NUMA nodes {format_cpulist(worker.numa_nodes)}", "set_mempolicy", error)


def policies(mempolicy: MemoryPolicy, nodes: frozenset[int]) -> tuple[Policy, ...]:
    """What to try, best first: preferred-many is unknown before Linux 5.15 (EINVAL)."""
    if not nodes or mempolicy == "none":
        return ()
    if mempolicy == "bind":
        return (Policy(mode=MPOL_BIND, numa_nodes=nodes),)
    if mempolicy == "interleave":
        return (Policy(mode=MPOL_INTERLEAVE, numa_nodes=nodes),)
    first = Policy(mode=MPOL_PREFERRED, numa_nodes=frozenset({min(nodes)}))
    return (first,) if len(nodes) == 1 else (Policy(mode=MPOL_PREFERRED_MANY, numa_nodes=nodes), first)


def _restore(cpus: set[int] | None, policy: Policy | None) -> None:
    """Effect: this process is bound as before (None: as it is). What was refused may be refused again."""
    try:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        if policy is not None:
            set_policy(policy)
    except OSError as error:
        if error.errno not in REFUSED:
            raise


def _own_cpus() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _own_policy(plan: LaunchPlan) -> Policy | None:
    """This process's memory policy; None if no worker wants one (then nothing is asked and nothing changes)."""
    if not any(policies(worker.mempolicy, worker.numa_nodes) for worker in plan.workers):
        return None
    try:
        return get_policy()
    except OSError:
        return Policy(mode=0, numa_nodes=frozenset())


def _reason(call: str, error: OSError) -> str:
    return f"{call}: {error.strerror}"


def _impossible(worker: WorkerPlan, value: str, call: str, error: Exception) -> LaunchError:
    detail = _reason(call, error) if isinstance(error, OSError) else f"{call}: {error}"
    return LaunchError(f"worker {worker.index} cannot be bound", value=value, source=detail, hint=PROBE_HINT)
