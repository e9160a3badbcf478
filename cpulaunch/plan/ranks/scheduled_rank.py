"""One rank of a job whose other ranks a scheduler started: every one plans alike and takes its own part."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, in_order, worker_cpus
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.records.plan import JobPlan
from cpulaunch.records.request import LaunchRequest, SchedulerRank

ELASTIC = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""What torch's agent tells its ranks. There is none here, and a rank that believes in one waits for its store."""


def own_places(pool: Pool, count: int) -> Placement:
    """The whole pool for this rank, where the scheduler bound each of the host's ranks to CPUs of its own."""
    place = worker_cpus(in_order(pool))
    return Placement(
        workers=(place,) * count, exclusive=True, reason="the scheduler bound this rank to CPUs of its own"
    )


def scheduled_rank_variables(
    job: JobPlan, scheduled_rank: SchedulerRank, request: LaunchRequest
) -> tuple[tuple[str, str | None], ...]:
    """What init_process_group("env://") needs, and torchrun's other variables as far as they are true here."""
    return (
        ("RANK", str(scheduled_rank.rank)),
        ("LOCAL_RANK", "0" if job.virtual_local_rank else str(scheduled_rank.local_rank)),
        ("GROUP_RANK", str(scheduled_rank.host_rank)),
        ("ROLE_RANK", str(scheduled_rank.rank)),
        ("ROLE_NAME", job.role),
        ("LOCAL_WORLD_SIZE", str(scheduled_rank.local_world_size)),
        ("WORLD_SIZE", str(scheduled_rank.world_size)),
        ("GROUP_WORLD_SIZE", str(job.hosts[1])),
        ("ROLE_WORLD_SIZE", str(scheduled_rank.world_size)),
        ("MASTER_ADDR", job.master_addr),
        ("MASTER_PORT", str(job.master_port)),
        *((name, None) for name in ELASTIC if name in request.environ),
    )


def shown(request: LaunchRequest, scheduled_rank: SchedulerRank) -> frozenset[int] | None:
    """For LaunchOptions.show: None if this rank's output is shown, an empty set if not.

    --show counts ranks of the job, --local-ranks-filter those of the host.
    """
    settings = request.settings
    hidden = (settings.show is not None and scheduled_rank.rank not in settings.show) or (
        settings.local_ranks_filter is not None and scheduled_rank.local_rank not in settings.local_ranks_filter
    )
    return frozenset() if hidden else None
