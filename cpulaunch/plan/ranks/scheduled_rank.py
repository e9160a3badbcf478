"""A rank that a scheduler started: each rank of the host makes the same plan and starts its own part of it."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, ordered_cores, worker_cpus
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.records.plan import JobPlan
from cpulaunch.records.request import LaunchRequest, SchedulerRank

ELASTIC_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables that torch's agent sets for its ranks. No agent runs here, and a rank that has them waits for its store."""


def place_on_own_cpus(pool: Pool, count: int) -> Placement:
    """The whole pool for this rank: the scheduler bound each rank of the host to CPUs of its own."""
    cpus = worker_cpus(ordered_cores(pool))
    return Placement(workers=(cpus,) * count, exclusive=True, reason="the scheduler bound this rank to CPUs of its own")


def scheduled_rank_variables(
    job: JobPlan, rank: SchedulerRank, request: LaunchRequest
) -> tuple[tuple[str, str | None], ...]:
    """The variables that init_process_group("env://") needs, and the variables of torchrun that are true here."""
    return (
        ("RANK", str(rank.rank)),
        ("LOCAL_RANK", "0" if job.virtual_local_rank else str(rank.local_rank)),
        ("GROUP_RANK", str(rank.host_rank)),
        ("ROLE_RANK", str(rank.rank)),
        ("ROLE_NAME", job.role),
        ("LOCAL_WORLD_SIZE", str(rank.local_world_size)),
        ("WORLD_SIZE", str(rank.world_size)),
        ("GROUP_WORLD_SIZE", str(job.hosts[1])),
        ("ROLE_WORLD_SIZE", str(rank.world_size)),
        ("MASTER_ADDR", job.master_addr),
        ("MASTER_PORT", str(job.master_port)),
        *((name, None) for name in ELASTIC_VARIABLES if name in request.environ),
    )


def shown_workers(request: LaunchRequest, rank: SchedulerRank) -> frozenset[int] | None:
    """The value of LaunchOptions.show: None if this rank's output is shown, an empty set if not.

    --show numbers ranks in the job, --local-ranks-filter numbers them on the host.
    """
    settings = request.settings
    hidden = (settings.show is not None and rank.rank not in settings.show) or (
        settings.local_ranks_filter is not None and rank.local_rank not in settings.local_ranks_filter
    )
    return frozenset() if hidden else None
