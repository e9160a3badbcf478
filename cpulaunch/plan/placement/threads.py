"""How many compute threads each worker gets when nobody else decides."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.placement.quota import shares
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DIGITS = 9
"""OpenMP runtimes keep the number of threads in 32 bits."""


@record
class Threads:
    """Compute threads by worker, and why that many; `limits`: CPUs of each worker that may run at a time."""

    counts: tuple[int, ...]
    limits: tuple[int, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def default_threads(pool: Pool, placement: Placement, request: LaunchRequest, *, loaders: int = 0) -> Threads:
    """One thread per logical CPU given out, less the reserve, within the worker's share of the quota.

    `loaders`: DataLoader workers of each worker that take from its CPU time, at most half of it.
    Raises: UsageError if --reserve leaves a worker nothing.
    """
    workers = placement.workers
    quota = pool.quota_threads
    paid = [worker.cpu_limit for worker in workers] if quota is None else shares(quota, len(workers))
    if request.distributed:  # The slowest rank holds up all others: what a division leaves over helps nobody.
        paid = [min(paid)] * len(workers)
    whole = tuple(min(worker.cpu_limit, share) for worker, share in zip(workers, paid, strict=True))
    limits = tuple(limit - min(loaders, limit // 2) for limit in whole)
    counts = tuple(_count(worker, limit, request) for worker, limit in zip(workers, limits, strict=True))
    parts = ["one thread per " + ("logical CPU" if request.settings.smt else "core")]
    if quota is not None:
        parts.append(f"limited by the CPU quota, which pays for {quota}")
    if request.settings.reserve:
        parts.append(f"{request.settings.reserve} kept free by --reserve")
    if loaders:
        parts.append(f"the time of {loaders} left to DataLoader workers")
    return Threads(
        counts=counts,
        limits=limits,
        reason=", ".join(parts),
        warnings=_quota_warnings(quota, len(workers), whole, request),
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
        "nothing left to compute on",
        value=f"{reserve} of {limit // per_core} cores reserved",
        source="--reserve",
        hint=f"--reserve {max(0, limit // per_core - 1)} or fewer, larger instances",
    )


def _quota_warnings(quota: int | None, count: int, limits: tuple[int, ...], request: LaunchRequest) -> tuple[str, ...]:
    size = request.settings.cores_per_instance
    if quota is None:
        return ()
    if count > quota:
        workers = "ranks" if request.distributed else "instances"
        return (f"{count} {workers} on a CPU quota of {quota}: the quota is oversubscribed, workers will be throttled",)
    if size is not None and size > min(limits):
        return (f"the CPU quota pays for {min(limits)} of the {size} cores of an instance",)
    return ()


def first_count(text: str) -> int | None:
    """The number of threads an OMP_NUM_THREADS value asks for at the outermost level; None if it is malformed.

    Source: OpenMP 5.2, section 21.1.2: a list gives one number per nesting level.
    """
    first = text.split(",")[0].strip()
    count = int(first) if len(first) <= MAX_DIGITS and first.isascii() and first.isdigit() else 0
    return count or None


def check_assigned(request: LaunchRequest, assigned: Mapping[str, str]) -> None:
    """Raises: UsageError if --env holds no number of threads or contradicts --threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in assigned and first_count(assigned[name]) is None:
            raise UsageError(
                f"{name} is not a number of threads", value=assigned[name], source="--env", hint="--threads N"
            )
    asked, value = request.settings.threads, assigned.get("OMP_NUM_THREADS")
    if value is not None and request.origin("threads") == "cli" and first_count(value) != asked:
        raise UsageError(
            f"--threads {asked} contradicts OMP_NUM_THREADS", value=value, source="--env", hint="give one of the two"
        )
