"""The plan of a job of ranks: their engine, number, CPUs, GPUs and variables. Other launches never import this."""

from __future__ import annotations

from cpulaunch.plan.gpus.assignment import rank_devices
from cpulaunch.plan.placement.instances import HostWorkers, Placement
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.ranks.checks import check_engine_options, check_kind, job_grace, job_warnings
from cpulaunch.plan.ranks.count import rank_count
from cpulaunch.plan.ranks.job import decide_job, global_rank, job_notes, world_size
from cpulaunch.plan.ranks.placement import place_ranks
from cpulaunch.plan.ranks.scheduled_rank import place_on_own_cpus, scheduled_rank_variables, shown_workers
from cpulaunch.plan.ranks.variables import job_variables, rank_variables
from cpulaunch.records.host import Host
from cpulaunch.records.plan import JobPlan
from cpulaunch.records.request import LaunchRequest


def plan_ranks(host: Host, request: LaunchRequest, pool: Pool) -> HostWorkers:
    """The ranks of a job on this host. Raises: UsageError if this host cannot start the ranks that are requested."""
    check_kind(request)
    count = rank_count(host, request, pool)
    job = decide_job(request, count)
    check_engine_options(request, native=job.engine == "native")
    devices = rank_devices(host, request, pool, count)
    return HostWorkers(
        job=job,
        world_size=world_size(job),
        placement=_placed(host, request, pool, count, devices.placement),
        started=tuple(range(count)) if job.scheduled_rank is None else (job.scheduled_rank.local_rank,),
        global_ranks=tuple(global_rank(job, local_rank) for local_rank in range(count)),
        variables=tuple(_variables(request, job, local_rank) for local_rank in range(count)),
        gpus=devices.gpus,
        variable_requests=(*job_variables(host, request, job), *devices.variable_requests),
        grace_seconds=job_grace(request),
        show=_show(request),
        notes=(*job_notes(request, job), *devices.notes),
        warnings=(*job_warnings(request), *devices.warnings),
    )


def _placed(host: Host, request: LaunchRequest, pool: Pool, count: int, near_gpus: Placement | None) -> Placement:
    if request.scheduled_rank is not None and request.scheduled_rank.own_cpus:
        return place_on_own_cpus(pool, count)
    return place_ranks(host, request, pool, count) if near_gpus is None else near_gpus


def _variables(request: LaunchRequest, job: JobPlan, local_rank: int) -> tuple[tuple[str, str | None], ...]:
    """The variables that describe a rank to itself; none where torch's agent sets them."""
    if job.engine == "elastic":
        return ()
    if job.scheduled_rank is None:
        return rank_variables(job, local_rank)
    return scheduled_rank_variables(job, job.scheduled_rank, request)


def _show(request: LaunchRequest) -> frozenset[int] | None:
    if request.scheduled_rank is not None:
        return shown_workers(request, request.scheduled_rank)
    settings = request.settings
    return settings.local_ranks_filter if settings.show is None else settings.show
