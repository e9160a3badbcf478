"""How many compute threads each worker gets by default."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.placement.quota import shares
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import count_text
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DIGITS = 9
"""OpenMP runtimes keep the number of threads in 32 bits."""


@record
class Threads:
    """The default number of compute threads of each worker, and why.

    `cpu_limits`: how many of each worker's CPUs may be busy at a time.
    """

    counts: tuple[int, ...]
    cpu_limits: tuple[int, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def default_threads(pool: Pool, placement: Placement, request: LaunchRequest, *, loaders: int = 0) -> Threads:
    """One thread per logical CPU of each worker, less the reserve, within its share of the quota.

    `loaders`: DataLoader workers of each worker that run on its compute CPUs; they get at most half of its CPU time.
    Raises: UsageError if --reserve leaves a worker no CPU.
    """
    workers = placement.workers
    quota = pool.quota_threads
    allowed = [worker.cpu_limit for worker in workers] if quota is None else shares(quota, len(workers))
    if request.distributed:  # All ranks wait for the slowest one, so a thread more for some of them gains nothing.
        allowed = [min(allowed)] * len(workers)
    usable = tuple(min(worker.cpu_limit, share) for worker, share in zip(workers, allowed, strict=True))
    limits = tuple(limit - min(loaders, limit // 2) for limit in usable)
    counts = tuple(_count(worker, limit, request) for worker, limit in zip(workers, limits, strict=True))
    parts = ["one thread per " + ("logical CPU" if request.settings.smt else "core")]
    if quota is not None:
        parts.append(f"limited by the CPU quota of {quota}")
    if request.settings.reserve:
        parts.append(f"{count_text(request.settings.reserve, 'core')} kept free by --reserve")
    if loaders:
        parts.append(f"CPU time left for {count_text(loaders, 'DataLoader worker')}")
    return Threads(
        counts=counts,
        cpu_limits=limits,
        reason=", ".join(parts),
        warnings=_quota_warnings(quota, len(workers), usable, request),
    )


def _count(worker: WorkerCpus, limit: int, request: LaunchRequest) -> int:
    reserve = request.settings.reserve
    per_core = max(1, worker.cpu_limit // len(worker.cores))
    threads = limit - reserve * per_core
    if threads >= 1:
        return threads
    if request.origin("reserve") != "cli":
        return 1
    raise UsageError(
        f"--reserve {reserve} leaves no core to compute on",
        value=f"an instance has {count_text(limit // per_core, 'core')}",
        hint=f"use --reserve {max(0, limit // per_core - 1)}, or fewer and larger instances",
    )


def _quota_warnings(quota: int | None, count: int, limits: tuple[int, ...], request: LaunchRequest) -> tuple[str, ...]:
    size = request.settings.cores_per_instance
    if quota is None:
        return ()
    if count > quota:
        workers = "ranks" if request.distributed else "instances"
        return (f"{count} {workers} share a CPU quota of {quota}: the kernel will throttle them",)
    if size is not None and size > min(limits):
        return (f"the CPU quota lets each instance use only {min(limits)} of its {size} cores",)
    return ()


def first_count(text: str) -> int | None:
    """The number of threads that an OMP_NUM_THREADS value gives the outermost level; None if it is malformed.

    Source: OpenMP 5.2, section 21.1.2: a list gives one number per nesting level.
    """
    first = text.split(",")[0].strip()
    count = int(first) if len(first) <= MAX_DIGITS and first.isascii() and first.isdigit() else 0
    return count or None


def check_assigned(request: LaunchRequest, assigned: Mapping[str, str]) -> None:
    """Raises: UsageError if a thread count set by --env is not a number or contradicts --threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in assigned and first_count(assigned[name]) is None:
            raise UsageError(f"{name} is not a number of threads", source="--env", hint="use --threads N")
    threads, value = request.settings.threads, assigned.get("OMP_NUM_THREADS")
    if value is not None and request.origin("threads") == "cli" and first_count(value) != threads:
        raise UsageError(f"--threads {threads} conflicts with --env OMP_NUM_THREADS={value}", hint="drop one of them")
