"""How many ranks this host gets, where each runs, and the variables that tell it which one it is."""

from __future__ import annotations

from cpulaunch.host import Host
from cpulaunch.plan.model import JobPlan
from cpulaunch.plan.placement import Placement, slot
from cpulaunch.plan.pool import Pool
from cpulaunch.request import LaunchRequest


def rank_count(host: Host, request: LaunchRequest, pool: Pool) -> int:
    """How many ranks were asked for on this host. Raises: UsageError if what they are counted by is not there."""
    asked = request.settings.nproc_per_node
    if isinstance(asked, int):
        return asked
    if asked is None:
        return 1
    if asked == "numa":
        return len({core.numa_node for core in pool.cores})
    if asked == "socket":
        return len({core.socket for core in pool.cores})
    if asked == "l3":
        return len({core.l3 for core in pool.cores})
    return len(pool.cores)


def place_ranks(host: Host, request: LaunchRequest, pool: Pool, count: int) -> Placement:
    """Slots of equal size, one for each rank of this host; left-over cores stay idle."""
    cores = tuple(sorted(pool.cores, key=lambda core: (core.numa_node, core.cpus[0])))
    size = max(1, len(cores) // count)
    slots = tuple(slot(cores[(i * size) % len(cores) :][:size]) for i in range(count))
    return Placement(slots=slots, exclusive=count <= len(cores), reason=f"{count} ranks on {len(cores)} cores")


def rank_variables(job: JobPlan, local_rank: int) -> tuple[tuple[str, str], ...]:
    """What torchrun tells a rank and is known before it starts, for the native engine.

    The launch adds MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_ERROR_FILE.
    """
    world = str(job.local_world_size)
    return (
        ("RANK", str(local_rank)),
        ("LOCAL_RANK", "0" if job.virtual_local_rank else str(local_rank)),
        ("GROUP_RANK", "0"),
        ("ROLE_RANK", str(local_rank)),
        ("ROLE_NAME", job.role),
        ("LOCAL_WORLD_SIZE", world),
        ("WORLD_SIZE", world),
        ("GROUP_WORLD_SIZE", "1"),
        ("ROLE_WORLD_SIZE", world),
        ("MASTER_ADDR", job.master_addr),
        ("TORCHELASTIC_MAX_RESTARTS", str(job.max_restarts)),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    )
