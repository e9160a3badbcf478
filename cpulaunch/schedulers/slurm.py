"""Slurm: `srun cpulaunch …`.

Source: man srun, "OUTPUT ENVIRONMENT VARIABLES" (what a task of a step sees); man sbatch (what a batch script sees:
the same names for the job, and no step).
"""

from __future__ import annotations

from cpulaunch.schedulers.slurm_lists import expand_counts, expand_hosts
from cpulaunch.schedulers.task import MOST_DIGITS, Machine, SchedulerTask, Variables, check_ranks, shared_text

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
"""The first id of special steps (batch scripts, salloc's shell). Source: slurm.h, SLURM_BATCH_SCRIPT."""
STEP_FACTOR = 7


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; a batch script and salloc's shell are no tasks."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    numbered = step.isascii() and step.isdigit() and len(step) <= MOST_DIGITS and int(step) < SPECIAL_STEPS
    return numbered and bool(environ.get("SLURM_PROCID"))


def tasks_in_step(environ: Mapping[str, str]) -> int:
    """Number of tasks in this step. Raises: UsageError if the variable is not a number."""
    return Variables(environ, TABLE).number("world_size") or 1


def read_task(environ: Mapping[str, str], machine: Machine) -> SchedulerTask:
    """The task that srun started, from its variables. Raises: UsageError if one is missing or malformed."""
    variables = Variables(environ, TABLE)
    error, hint = "srun did not start this process", "srun cpulaunch SCRIPT, or --scheduler none"
    step = variables.required("step", error=error, hint=hint)
    job = variables.required("job", error=error, hint=hint)
    rank = variables.required("rank", error=error, hint=hint)
    world_size = variables.number("world_size") or 1
    hosts = variables.number("hosts") or 1
    host_rank = variables.number("host_rank") or 0
    tasks = variables.parsed("tasks", expand_counts) or (world_size,)
    local_world_size = tasks[host_rank] if host_rank < len(tasks) else 1
    local_rank = variables.number("local_rank") or 0
    check_ranks("srun", rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)
    nodes = variables.parsed("nodes", expand_hosts)
    return SchedulerTask(
        scheduler="slurm",
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        hosts=hosts,
        host_rank=host_rank,
        job=f"{job}.{step}",
        first_host=nodes[0] if nodes else None,
        port_seed=(STEP_FACTOR * job + step, f"{STEP_FACTOR} x job {job} + step {step}"),
        one_per_host=world_size == hosts and all(count == 1 for count in tasks),
        own_cpus=local_world_size > 1 and _own_cpus(variables, machine),
        sources=variables.sources,
        warnings=_warnings(variables, machine, local_world_size),
    )


def _own_cpus(variables: Variables, machine: Machine) -> bool:
    """Whether Slurm bound this host's tasks to different CPUs.

    The list of masks shows it. Without the list, a task that runs on exactly the CPUs of one task in a larger
    allocation was bound by a plugin that sets no variable (cgroups).
    """
    text = variables.text("masks")
    if text is not None:
        masks = text.split(",")
        return len(masks) > 1 and len(set(masks)) == len(masks)
    cpus_per_task = variables.number("cpus_per_task") or 1
    return machine.cpus == cpus_per_task and _allocated(variables) > cpus_per_task


def _allocated(variables: Variables) -> int:
    """CPUs of the job or of the step on this host, the larger number; 0 if unknown."""
    step = variables.number("cpus_of_step") or 0
    counts = variables.parsed("cpus_of_job", expand_counts) or ()
    nodes, node = variables.parsed("nodes_of_job", expand_hosts) or (), variables.text("node")
    job = 0
    if len(set(counts)) == 1:
        job = counts[0]
    elif node in nodes and len(nodes) == len(counts):
        job = counts[nodes.index(node)]
    return max(step, job)


def _warnings(variables: Variables, machine: Machine, tasks: int) -> tuple[str, ...]:
    """Warnings about Slurm's binding of this host's tasks."""
    allocated = _allocated(variables)
    masks = (variables.text("masks") or "").split(",")
    if 1 < len(set(masks)) < len(masks):
        return (
            f"Slurm bound several tasks on this host to the same CPUs: {shared_text(machine.cpus, tasks)}; "
            "srun --cpu-bind=none lets cpulaunch use all CPUs",
        )
    if machine.cpus == 1 and allocated > tasks:
        share = allocated // tasks
        return (
            f"Slurm bound this task to a single one of the job's {allocated} CPUs on this host; "
            f"use srun --cpus-per-task={share} (or --cpu-bind=none)",
        )
    if allocated and machine.cpus > allocated and machine.cpus == machine.host_cpus:
        return (
            f"the job has {allocated} of this host's {machine.cpus} CPUs, but Slurm does not bind this task to them; "
            "use --cpus LIST or srun --cpu-bind=cores to stay off other jobs' CPUs",
        )
    return ()
