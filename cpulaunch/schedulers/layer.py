"""What a scheduler says, as a layer of settings: this process is one host of the job, or one rank of it."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Layer, SchedulerRank
from cpulaunch.records.settings import JOB_SETTINGS
from cpulaunch.schedulers import mpi, pbs, slurm
from cpulaunch.schedulers.task import Machine, SchedulerTask, port_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    Told: TypeAlias = "dict[str, tuple[Any, str]]"
    """By setting: its value, and why."""

BACKENDS = {"slurm": slurm.read_task, "mpi": mpi.read_task, "pbs": pbs.read_task}
LOOPBACK = "127.0.0.1"
INDEPENDENT = ("instances", "cores_per_instance", "instance_index")
"""Settings of independent copies: whoever asks for them does not mean one job."""
MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables of Open MPI's mpirun and of Hydra's, which srun does not set."""
CHOOSING = frozenset(("cpus", "numa_nodes"))
"""Settings that say which CPUs to use, whatever the scheduler bound this process to."""
AGENTS_ONLY = ("max_restarts", "redirects", "tee", "duplicate_stdout_filters", "duplicate_stderr_filters")
"""Settings that only a launcher which stays beside its ranks can carry out."""


def scheduler_layer(environ: Mapping[str, str], chosen: Mapping[str, Any], machine: Machine) -> Layer | None:
    """What the scheduler's variables add to the settings `chosen` so far; None where they do not count.

    Raises: UsageError if they were asked for and are not there, or contradict what was chosen.
    """
    name = scheduler_meant(environ, chosen)
    if name is None:
        return _other_rank(environ, chosen)
    task = BACKENDS[name](environ, machine)
    agent = task.one_per_host and (name != "mpi" or "nproc_per_node" in chosen)
    if agent and _complete(chosen):
        return None
    _check_hosts(task, chosen)
    return _host_layer(task, environ, chosen) if agent else _rank_layer(task, environ, chosen)


def scheduler_meant(environ: Mapping[str, str], chosen: Mapping[str, Any]) -> str | None:
    """Whose variables count: the scheduler asked for, or Slurm inside a step that looks like a job of ranks.

    A process that is a rank already (RANK is set) is not made one again, and where mpirun started it inside a step
    of its own daemons, Slurm's variables are theirs.
    """
    asked = str(chosen.get("scheduler", "auto"))
    if asked != "auto":
        return None if asked == "none" else asked
    if any(name in environ for name in ("RANK", *MPIRUN)) or any(name in chosen for name in INDEPENDENT):
        return None
    if not slurm.in_step(environ):
        return None
    distributed = any(name in chosen for name in JOB_SETTINGS)
    return "slurm" if distributed or slurm.tasks_in_step(environ) > 1 else None


def _other_rank(environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer | None:
    """A warning where RANK is from another step than this one: a rank ran srun. None otherwise.

    Under torch's agent or cpulaunch's own (TORCHELASTIC_RUN_ID) ranks are never those of a step.
    """
    others = ("TORCHELASTIC_RUN_ID", *MPIRUN)
    alone = chosen.get("scheduler") == "none" or any(name in chosen for name in INDEPENDENT)
    if "RANK" not in environ or alone or any(name in environ for name in others) or not slurm.in_step(environ):
        return None
    rank, tasks = environ["SLURM_PROCID"], slurm.tasks_in_step(environ)
    if tasks == 1 or (environ["RANK"], environ.get("WORLD_SIZE", str(tasks))) == (rank, str(tasks)):
        return None
    warning = (
        f"RANK={environ['RANK']} in your environment is taken for this process's, but srun started it as {rank} of "
        f"{tasks}: --scheduler slurm makes it that rank, --scheduler none keeps srun out of it"
    )
    return Layer(origin="environment", values={}, warnings=(warning,))


def _complete(chosen: Mapping[str, Any]) -> bool:
    """Whether the command line says all that a scheduler would: it is torchrun's, started host by host."""
    placed = "rdzv_endpoint" in chosen or {"node_rank", "master_addr"} <= chosen.keys()
    return bool(chosen.get("standalone")) or ("nnodes" in chosen and placed)


def _check_hosts(task: SchedulerTask, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if --nnodes does not allow for the hosts the scheduler started."""
    low, high = chosen.get("nnodes") or (1, 1 << 30)
    if task.hosts and not low <= task.hosts <= high:
        raise UsageError(
            f"--nnodes does not fit what {task.starter} started",
            value=f"{low if low == high else f'{low}:{high}'} hosts asked for, {task.hosts} started",
            source=task.sources.get("hosts", task.sources.get("world_size", "your environment")),
            hint="leave --nnodes out, or --scheduler none to start a job on every host for itself",
        )


# One process per host


def _host_layer(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    why = f"{task.starter} started a process for each host, and this is one"
    told: Told = {"scheduler": (task.scheduler, why)}
    if task.hosts:
        told["nnodes"] = _hosts(task)
    low, high = chosen.get("nnodes", (task.hosts, task.hosts))
    if not high:
        raise _no_host_list(task)
    if high > 1:
        told["rdzv_id"] = f"{task.scheduler}-{task.job}", "the scheduler's name of the job"
        elastic = low < high or chosen.get("rdzv_backend", "static") != "static"
        told |= (_meeting_elastic if elastic else _meeting_static)(task, environ, chosen)
    return _layer(task, chosen, told)


def _no_host_list(task: SchedulerTask) -> UsageError:
    return UsageError(
        "how many hosts the job has is not to be found out here",
        value="PBS_NODEFILE cannot be read on this host",
        source=f"started by {task.starter}",
        hint="--nnodes N --master-addr HOST (OpenPBS keeps that file on the job's first host only)",
    )


def _meeting_static(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where a fixed number of hosts meet, and which of them this is."""
    told: Told = {"node_rank": (task.host_rank, f"this host's number: {_source(task, 'host_rank')}")}
    return told if "rdzv_endpoint" in chosen else told | _master(task, environ, chosen)


def _meeting_elastic(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where hosts meet that may come and go: at a store on the first one."""
    told: Told = {"rdzv_backend": ("c10d", "hosts may come and go")}
    if chosen.get("rdzv_backend", "c10d") != "c10d" or "rdzv_endpoint" in chosen:
        return told
    host, why_host = _master_addr(task, environ, chosen)
    port, why_port = _master_port(task, environ, chosen)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    first = "true" if task.host_rank == 0 else "false"
    told["rdzv_endpoint"] = endpoint, f"{why_host}; port {why_port}"
    told["rdzv_conf"] = (("is_host", first),), "the first host keeps the store"
    return told


# One process per rank


def _rank_layer(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    _check_rank(task, chosen)
    place = f"{task.rank} of {task.world_size}, {task.local_rank} of {task.local_world_size} on this host"
    read = f"{_source(task, 'rank')}, {_source(task, 'local_rank')}"
    told: Told = {
        "scheduler": (
            task.scheduler,
            f"{task.starter} started a process for each rank: this is {place} ({read})",
        ),
        "nnodes": _hosts(task),
    }
    scheduled_rank = SchedulerRank(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=task.local_rank,
        local_world_size=task.local_world_size,
        host_rank=task.rank // task.local_world_size if task.host_rank is None else task.host_rank,
        own_cpus=task.own_cpus and not CHOOSING & chosen.keys(),
    )
    return _layer(task, chosen, told | _master(task, environ, chosen), scheduled_rank=scheduled_rank)


def _check_rank(task: SchedulerTask, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if ranks were asked for beside those that are there."""
    asked = chosen.get("nproc_per_node")
    if asked not in (None, task.local_world_size):
        raise UsageError(
            f"{task.starter} started {task.local_world_size} process"
            f"{'es' * (task.local_world_size > 1)} on this host, each is a rank already",
            value=f"--nproc-per-node {asked}",
            source=_source(task, "local_world_size" if task.scheduler == "mpi" else "tasks"),
            hint=f"drop --nproc-per-node, or let {task.starter} start one process per host",
        )


# What both have in common


def _layer(
    task: SchedulerTask, chosen: Mapping[str, Any], told: Told, *, scheduled_rank: SchedulerRank | None = None
) -> Layer:
    """The layer, with warnings of what cannot be done."""
    lost = [name for name in AGENTS_ONLY if chosen.get(name)] if scheduled_rank is not None else []
    warnings = [
        f"--{name.replace('_', '-')} is not applied: {task.starter} starts the ranks, and cpulaunch becomes them"
        for name in lost
    ]
    return Layer(
        origin="environment",
        values={name: value for name, (value, _) in told.items()},
        reasons={name: reason for name, (_, reason) in told.items()},
        scheduled_rank=scheduled_rank,
        warnings=(*(() if CHOOSING & chosen.keys() else task.warnings), *warnings),
    )


def _hosts(task: SchedulerTask) -> tuple[tuple[int, int], str]:
    source = task.sources.get("hosts") or f"{_source(task, 'world_size')} and {_source(task, 'local_world_size')}"
    return (task.hosts, task.hosts), f"hosts that {task.starter} started on: {source}"


def _master(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where rank 0 listens. Raises: UsageError."""
    return {
        "master_addr": _master_addr(task, environ, chosen),
        "master_port": _master_port(task, environ, chosen),
    }


def _source(task: SchedulerTask, what: str) -> str:
    return task.sources.get(what, "not told")


def _master_addr(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Where rank 0 is, and who says so. Raises: UsageError if nobody does."""
    if "master_addr" in chosen:
        return chosen["master_addr"], "--master-addr"
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "MASTER_ADDR in your environment"
    if task.hosts == 1:
        return LOOPBACK, "all ranks are on this host"
    if task.master is not None:
        return task.master, f"the first host of {_source(task, 'nodes')}"
    raise UsageError(
        "rank 0's host is not known",
        value="no variable names it",
        source=f"started by {task.starter}",
        hint="--master-addr HOST, or mpirun -x MASTER_ADDR=HOST (Intel MPI, MPICH: -genv MASTER_ADDR HOST)"
        if task.scheduler == "mpi"
        else "--master-addr HOST",
    )


def _master_port(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[int, str]:
    """The port of rank 0's store, and where it is from. Raises: UsageError if no variable identifies the job."""
    if "master_port" in chosen:
        return chosen["master_port"], "--master-port"
    given = environ.get("MASTER_PORT", "")
    if given:
        if not (given.isascii() and given.isdigit() and len(given) < 6 and 0 < int(given) < 1 << 16):
            raise UsageError(
                "MASTER_PORT is no port", value=repr(given), source="your environment", hint="--master-port PORT"
            )
        return int(given), "MASTER_PORT in your environment"
    if task.port_id is None:
        raise UsageError(
            "no port that only this job uses",
            value="no variable names the job",
            source=f"started by {task.starter}",
            hint="--master-port PORT, or MASTER_PORT in the environment, the same for all ranks",
        )
    return port_of(task.port_id)
