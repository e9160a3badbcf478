"""Slurm: `srun cpulaunch …`.

Source: man srun, "OUTPUT ENVIRONMENT VARIABLES" (what a task of a step sees); man sbatch (what a batch script sees:
the same names for the job, and no step).
"""

from __future__ import annotations

from cpulaunch.schedulers.slurm_lists import expand_counts, expand_hosts
from cpulaunch.schedulers.task import MOST_DIGITS, Machine, SchedulerTask, Variables, check_place, shared_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE = {
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "local_rank": ("SLURM_LOCALID",),
    "hosts": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "host_rank": ("SLURM_NODEID",),
    "tasks": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "nodes": ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
    "cpus_of_step": ("SLURM_CPUS_ON_NODE",),
    "cpus_of_job": ("SLURM_JOB_CPUS_PER_NODE",),
    "nodes_of_job": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "node": ("SLURMD_NODENAME",),
    "cpus_per_task": ("SLURM_CPUS_PER_TASK",),
    "masks": ("SLURM_CPU_BIND_LIST",),
}
SPECIAL_STEPS = 0xFFFFFFF0
"""From here on ids are no steps of tasks: batch scripts, salloc's shell. Source: slurm.h, SLURM_BATCH_SCRIPT."""
STEP_FACTOR = 7


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task: neither a batch script nor salloc's shell is one."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    numbered = step.isascii() and step.isdigit() and len(step) <= MOST_DIGITS and int(step) < SPECIAL_STEPS
    return numbered and bool(environ.get("SLURM_PROCID"))


def tasks_in_step(environ: Mapping[str, str]) -> int:
    """How many processes srun started with this one. Raises: UsageError if the variable is no number."""
    return Variables(environ, TABLE).number("world_size") or 1


def read_task(environ: Mapping[str, str], machine: Machine) -> SchedulerTask:
    """What srun says about this task. Raises: UsageError if this is none, or a variable is malformed."""
    said = Variables(environ, TABLE)
    hint = "srun cpulaunch SCRIPT, or --scheduler none"
    missing = "srun did not start this process"
    step = said.needed("step", missing=missing, hint=hint)
    job = said.needed("job", missing=missing, hint=hint)
    rank = said.needed("rank", missing=missing, hint=hint)
    world_size = said.number("world_size") or 1
    hosts = said.number("hosts") or 1
    host_rank = said.number("host_rank") or 0
    tasks = said.parsed("tasks", expand_counts) or (world_size,)
    here = tasks[host_rank] if host_rank < len(tasks) else 1
    local_rank = said.number("local_rank") or 0
    check_place("srun", rank=rank, world_size=world_size, local_rank=local_rank, here=here)
    nodes = said.parsed("nodes", expand_hosts)
    return SchedulerTask(
        scheduler="slurm",
        starter="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=here,
        hosts=hosts,
        host_rank=host_rank,
        job=f"{job}.{step}",
        master=nodes[0] if nodes else None,
        port_id=(STEP_FACTOR * job + step, f"{STEP_FACTOR} x job {job} + step {step}"),
        one_per_host=world_size == hosts and all(count == 1 for count in tasks),
        own_cpus=here > 1 and _own_cpus(said, machine),
        sources=said.sources,
        warnings=_warnings(said, machine, here),
    )


def _own_cpus(said: Variables, machine: Machine) -> bool:
    """Whether Slurm bound this host's tasks to different CPUs.

    By the list of masks where it gives one. Without one, a mask of the size of one task on a larger allocation is
    the work of a plugin that does not say so (cgroups).
    """
    masks = said.text("masks")
    if masks is not None:
        each = masks.split(",")
        return len(each) > 1 and len(set(each)) == len(each)
    asked = said.number("cpus_per_task") or 1
    return machine.cpus == asked and _allocated(said) > asked


def _allocated(said: Variables) -> int:
    """CPUs that the job or the step, whichever is more, has on this host; 0 if nothing says so."""
    step = said.number("cpus_of_step") or 0
    counts = said.parsed("cpus_of_job", expand_counts) or ()
    nodes, node = said.parsed("nodes_of_job", expand_hosts) or (), said.text("node")
    job = 0
    if len(set(counts)) == 1:
        job = counts[0]
    elif node in nodes and len(nodes) == len(counts):
        job = counts[nodes.index(node)]
    return max(step, job)


def _warnings(said: Variables, machine: Machine, tasks: int) -> tuple[str, ...]:
    allocated = _allocated(said)
    masks = (said.text("masks") or "").split(",")
    if 1 < len(set(masks)) < len(masks):
        return (
            f"Slurm bound some of this host's tasks to the same CPUs: {shared_text(machine.cpus, tasks)}; "
            "srun --cpu-bind=none leaves all of them to cpulaunch",
        )
    if machine.cpus == 1 and allocated > tasks:
        share = allocated // tasks
        return (
            f"Slurm lets this task run on ONE CPU although the job has {allocated} on this host: everything here "
            f"would share it; srun --cpus-per-task={share} (or --cpu-bind=none) gives the rest",
        )
    if allocated and machine.cpus > allocated and machine.cpus == machine.host_cpus:
        return (
            f"the job has {allocated} CPUs on this host, and Slurm confines this task to none of its {machine.cpus}: "
            f"--cpus LIST, or srun --cpu-bind=cores, keeps it off other jobs' CPUs",
        )
    return ()
