"""OMP_NUM_THREADS and MKL_NUM_THREADS: who decides each, and the thread count that follows."""

from cpulaunch.plan.placement.threads import Threads, check_assigned, first_count
from cpulaunch.plan.variables.resolve import VariableRequest, per_worker
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

OMP, MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


@record
class Compute:
    """Threads by worker as they will be, the variables that say so, and what to warn of.

    `limits`: CPUs of each worker that may run at a time. `malformed`: variables of the user's environment that
    hold no number of threads and are replaced.
    """

    threads: tuple[int, ...]
    limits: tuple[int, ...]
    variable_requests: tuple[VariableRequest, ...]
    malformed: frozenset[str]
    warnings: tuple[str, ...]


def decide_compute(request: LaunchRequest, default: Threads) -> Compute:
    """The thread counts of all workers: --env and --threads, the user's environment, a profile, the cores.

    Raises: UsageError if --env holds no number or contradicts --threads.
    """
    assigned = dict(request.settings.env)
    check_assigned(request, assigned)
    malformed = frozenset(
        name for name in (OMP, MKL) if name in request.environ and first_count(request.environ[name]) is None
    )
    decided, source = _decided(request, assigned, malformed)
    threads = default.counts if decided is None else (decided,) * len(default.counts)
    replaced = tuple(
        f"{name}={request.environ[name]} in your environment is not a number of threads: replaced"
        for name in sorted(malformed)
    )
    omp = _wish(OMP, request, default.counts, default.reason)
    mkl = per_worker(MKL, [str(count) for count in threads], origin="default", reason=f"follows {OMP}")
    if decided == request.settings.threads:
        mkl = _wish(MKL, request, threads, mkl.reason)
    return Compute(
        threads=threads,
        limits=default.limits,
        variable_requests=(omp, mkl),
        malformed=malformed,
        warnings=(*default.warnings, *replaced, *_oversized(decided, source, default.limits)),
    )


def _decided(request: LaunchRequest, assigned: dict[str, str], malformed: frozenset[str]) -> tuple[int | None, str]:
    """The number of threads somebody chose (None: nobody) and who."""
    if OMP in assigned:
        return first_count(assigned[OMP]), f"--env {OMP}"
    if request.origin("threads") == "cli":
        return request.settings.threads, "--threads"
    if OMP in request.environ and OMP not in malformed:
        return first_count(request.environ[OMP]), f"{OMP} in your environment"
    for origin, variable in request.profile_env:
        if variable.name == OMP and (count := first_count(variable.value)) is not None:
            return count, origin
    return request.settings.threads, request.origin("threads")


def _wish(name: str, request: LaunchRequest, counts: tuple[int, ...], reason: str) -> VariableRequest:
    if request.settings.threads is None:
        return per_worker(name, [str(count) for count in counts], origin="default", reason=reason)
    return VariableRequest(
        name=name,
        value=str(request.settings.threads),
        origin=request.origin("threads"),
        reason=request.reasons.get("threads", "--threads"),
    )


def _oversized(threads: int | None, source: str, limits: tuple[int, ...]) -> tuple[str, ...]:
    """A warning if the threads somebody chose are more than a worker's CPUs or share of the quota."""
    narrowest = min(limits)
    if threads is None or threads <= narrowest:
        return ()
    return (f"{threads} threads ({source}), but a worker has {narrowest} CPUs: they will take turns",)
