"""The number of compute threads of each worker, and OMP_NUM_THREADS and MKL_NUM_THREADS, which set it."""

from cpulaunch.plan.placement.threads import Threads, check_assigned, first_count
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.host import count_text
from cpulaunch.records.plan import VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

OMP, MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


@record
class ThreadPlan:
    """The number of compute threads of each worker, and the variables that set it.

    `cpu_limits`: how many of each worker's CPUs may be busy at a time. `malformed`: variables of the user's
    environment that hold no number of threads and are replaced.
    """

    counts: tuple[int, ...]
    cpu_limits: tuple[int, ...]
    variable_requests: tuple[VariableRequest, ...]
    malformed: frozenset[str]
    warnings: tuple[str, ...]


def plan_threads(request: LaunchRequest, default: Threads) -> ThreadPlan:
    """The thread counts of all workers: from --env and --threads, the user's environment, a profile or the default.

    Raises: UsageError if --env sets no number of threads or contradicts --threads.
    """
    assigned = dict(request.settings.env)
    check_assigned(request, assigned)
    malformed = frozenset(
        name for name in (OMP, MKL) if name in request.environ and first_count(request.environ[name]) is None
    )
    chosen, source = _chosen(request, assigned, malformed)
    counts = default.counts if chosen is None else (chosen,) * len(default.counts)
    replaced = tuple(
        f"{name}={request.environ[name]} in your environment is not a number of threads and is replaced"
        for name in sorted(malformed)
    )
    omp = _variable(OMP, request, default.counts, default.reason)
    mkl = per_worker(MKL, [str(count) for count in counts], origin="default", reason=f"follows {OMP}")
    if chosen == request.settings.threads:
        mkl = _variable(MKL, request, counts, mkl.reason)
    return ThreadPlan(
        counts=counts,
        cpu_limits=default.cpu_limits,
        variable_requests=(omp, mkl),
        malformed=malformed,
        warnings=(*default.warnings, *replaced, *_too_many(chosen, source, default.cpu_limits)),
    )


def _chosen(request: LaunchRequest, assigned: dict[str, str], malformed: frozenset[str]) -> tuple[int | None, str]:
    """The number of threads that the user or a profile chose, and how; None for the default."""
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


def _variable(name: str, request: LaunchRequest, counts: tuple[int, ...], reason: str) -> VariableRequest:
    if request.settings.threads is None:
        return per_worker(name, [str(count) for count in counts], origin="default", reason=reason)
    return VariableRequest(
        name=name,
        value=str(request.settings.threads),
        origin=request.origin("threads"),
        reason=request.reasons.get("threads", "--threads"),
    )


def _too_many(threads: int | None, source: str, limits: tuple[int, ...]) -> tuple[str, ...]:
    """A warning if the chosen number of threads is larger than a worker's CPUs or its share of the quota."""
    fewest = min(limits)
    if threads is None or threads <= fewest:
        return ()
    return (f"{threads} threads ({source}) share the {count_text(fewest, 'CPU')} of a worker and take turns",)
