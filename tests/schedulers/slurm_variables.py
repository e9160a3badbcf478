"""What Slurm 22.05 sets for the tasks of a step, as a real one did (man srun, "OUTPUT ENVIRONMENT VARIABLES")."""

from cpulaunch.schedulers.task import Machine

BIG = Machine(cpus=16, host_cpus=16)


def task(rank: int = 0, *, tasks: str = "1(x2)", nodes: str = "n[1-2]", **other: str) -> dict[str, str]:
    """The variables of one task of step 0 of job 12, which has 16 CPUs on each host; "" removes one."""
    counts = expanded(tasks)
    node = next(index for index in range(len(counts)) if sum(counts[: index + 1]) > rank)
    environ = {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - sum(counts[:node])),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NNODES": str(len(counts)),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_JOB_CPUS_PER_NODE": f"16(x{len(counts)})",
        "SLURM_CPU_BIND_TYPE": "none",
        "SLURM_CPU_BIND_LIST": "",
    } | other
    return {name: value for name, value in environ.items() if value}


def expanded(tasks: str) -> list[int]:
    """[2, 2, 1] for "2(x2),1"."""
    return [
        int(part.partition("(")[0])
        for part in tasks.split(",")
        for _ in range(int(part.partition("(x")[2].rstrip(")") or 1))
    ]


def without(environ: dict[str, str], *prefixes: str) -> dict[str, str]:
    """The variables but those whose names begin so."""
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}
