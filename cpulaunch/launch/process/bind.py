"""Binding to CPUs and NUMA memory, tried on this process before any worker starts."""

from __future__ import annotations

import errno
import os

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan, WorkerPlan
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

    from cpulaunch.records.settings import MemoryPolicy

Notify: TypeAlias = "Callable[[str], bool]"
"""Shows the user one line; returns whether it was written."""

REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PERMIT_HINT = "in a container, use --cap-add SYS_NICE or a seccomp profile that allows set_mempolicy"
ABSENT_HINT = "this kernel has no NUMA memory policies; use --membind none"
PROBE_HINT = "run `cpulaunch probe` to see what this process may use"


@record
class Binding:
    """A worker's CPUs and memory policy, as this kernel accepts them. The worker inherits what is empty or None."""

    cpus: frozenset[int] = frozenset()
    policy: Policy | None = None


UNBOUND = Binding()


def apply_binding(binding: Binding) -> None:
    """Effect: binds the calling thread, the threads and children it makes, and what it executes. Raises: OSError."""
    if binding.policy is not None:
        set_policy(binding.policy)
    if binding.cpus:
        os.sched_setaffinity(0, binding.cpus)


def prepare_bindings(plan: LaunchPlan, *, notify: Notify) -> tuple[Binding, ...]:
    """One binding for each worker, empty unless the binder is native.

    Effect: tries each on this process, then restores this process's own binding. Drops what the kernel refuses, with
    one line to `notify`.
    Raises: LaunchError for a refusal if the plan is strict, and for CPUs or NUMA nodes that do not exist or that this
    process may not use.
    """
    if plan.launch.binder != "native":
        return (UNBOUND,) * len(plan.workers)
    reported: set[str] = set()

    def degrade(what: str, *, why: str, hint: str) -> None:
        if plan.launch.strict:
            raise LaunchError(what, value=why, source="--strict", hint=hint)
        if what not in reported:
            reported.add(what)
            notify(f"warning: {what}: {why}; {hint}")

    accepted: dict[tuple[str, frozenset[int]], Policy | None] = {}
    bindings = []
    cpus, policy = _own_cpus(), _own_policy(plan)
    try:
        for worker in plan.workers:
            planned = (worker.mempolicy, worker.numa_nodes)
            if planned not in accepted:
                accepted[planned] = _try_policy(worker, degrade)
            bindings.append(Binding(cpus=_try_cpus(worker, degrade), policy=accepted[planned]))
    finally:
        _restore(cpus, policy)
    return tuple(bindings)


Degrade: TypeAlias = "Callable[..., None]"


def _try_cpus(worker: WorkerPlan, degrade: Degrade) -> frozenset[int]:
    """The CPUs that this kernel binds the worker to; empty where it refuses. Effect: binds this process to them."""
    if not worker.cpus:
        return frozenset()
    if not hasattr(os, "sched_setaffinity"):
        degrade("workers are not bound to CPUs", why="this system cannot bind", hint="use --binder none")
        return frozenset()
    try:
        os.sched_setaffinity(0, worker.cpus)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno in REFUSED:
            degrade("workers are not bound to CPUs", why=_reason("sched_setaffinity", error), hint="use --binder none")
            return frozenset()
        raise _binding_error(worker, f"CPUs {format_cpulist(worker.cpus)}", "sched_setaffinity", error) from None
    granted = frozenset(os.sched_getaffinity(0))
    if granted != worker.cpus:
        # The kernel intersects with the cpuset without an error.
        withheld = format_cpulist(worker.cpus - granted)
        what = f"worker {worker.index} does not get all its CPUs"
        degrade(what, why=f"the kernel withholds {withheld}", hint=PROBE_HINT)
    return granted


def _try_policy(worker: WorkerPlan, degrade: Degrade) -> Policy | None:
    """The first candidate policy that this kernel accepts; None if the worker inherits its policy."""
    error: OSError | None = None
    for policy in candidate_policies(worker.mempolicy, worker.numa_nodes):
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
    raise _binding_error(worker, f"NUMA nodes {format_cpulist(worker.numa_nodes)}", "set_mempolicy", error)


def candidate_policies(mempolicy: MemoryPolicy, nodes: frozenset[int]) -> tuple[Policy, ...]:
    """Kernel policies for this memory policy, best first: Linux before 5.15 refuses preferred-many with EINVAL."""
    if not nodes or mempolicy == "none":
        return ()
    if mempolicy == "bind":
        return (Policy(mode=MPOL_BIND, numa_nodes=nodes),)
    if mempolicy == "interleave":
        return (Policy(mode=MPOL_INTERLEAVE, numa_nodes=nodes),)
    first = Policy(mode=MPOL_PREFERRED, numa_nodes=frozenset({min(nodes)}))
    return (first,) if len(nodes) == 1 else (Policy(mode=MPOL_PREFERRED_MANY, numa_nodes=nodes), first)


def _restore(cpus: set[int] | None, policy: Policy | None) -> None:
    """Effect: binds this process to these CPUs and sets this policy (None: no change), unless the kernel refuses."""
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
    """This process's memory policy; None if no worker changes it."""
    if not any(candidate_policies(worker.mempolicy, worker.numa_nodes) for worker in plan.workers):
        return None
    try:
        return get_policy()
    except OSError:
        return Policy(mode=0, numa_nodes=frozenset())


def _reason(call: str, error: OSError) -> str:
    return f"{call}: {error.strerror}"


def _binding_error(worker: WorkerPlan, value: str, call: str, error: Exception) -> LaunchError:
    detail = _reason(call, error) if isinstance(error, OSError) else f"{call}: {error}"
    return LaunchError(f"worker {worker.index} cannot be bound", value=value, source=detail, hint=PROBE_HINT)
