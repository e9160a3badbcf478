"""The layer of settings that a scheduler's variables give: this process is one host of the job, or one rank of it."""

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

    Explained: TypeAlias = "dict[str, tuple[Any, str]]"
    """Settings by name: the value, and the reason for it."""

READERS = {"slurm": slurm.read_task, "mpi": mpi.read_task, "pbs": pbs.read_task}
LOOPBACK = "127.0.0.1"
INSTANCE_SETTINGS = ("instances", "cores_per_instance", "instance_index")
"""Settings of independent copies, which are not a job of ranks."""
MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables of Open MPI's mpirun and of Hydra's, which srun does not set."""
CPU_SETTINGS = frozenset(("cpus", "numa_nodes"))
"""Settings that choose CPUs, so that the scheduler's binding does not matter."""
SUPERVISOR_SETTINGS = ("max_restarts", "redirects", "tee", "duplicate_stdout_filters", "duplicate_stderr_filters")
"""Settings that need a launcher which keeps running beside its ranks."""


def scheduler_layer(environ: Mapping[str, str], chosen: Mapping[str, Any], machine: Machine) -> Layer | None:
    """The settings that the scheduler's variables add to those `chosen` so far; None if they do not apply.

    Raises: UsageError if requested variables are missing, or contradict what was chosen.
    """
    name = scheduler_name(environ, chosen)
    if name is None:
        return _rank_conflict(environ, chosen)
    task = READERS[name](environ, machine)
    is_host = task.one_per_host and (name != "mpi" or "nproc_per_node" in chosen)
    if is_host and _is_complete(chosen):
        return None
    _check_hosts(task, chosen)
    return _host_layer(task, environ, chosen) if is_host else _rank_layer(task, environ, chosen)


def scheduler_name(environ: Mapping[str, str], chosen: Mapping[str, Any]) -> str | None:
    """The scheduler whose variables apply: the requested one, or Slurm in a step that looks like a job of ranks.

    A process that is a rank already (RANK is set) does not become another one. In a step that mpirun created for its
    daemons, Slurm's variables describe the daemons.
    """
    requested = str(chosen.get("scheduler", "auto"))
    if requested != "auto":
        return None if requested == "none" else requested
    if any(name in environ for name in ("RANK", *MPIRUN_VARIABLES)) or any(
        name in chosen for name in INSTANCE_SETTINGS
    ):
        return None
    if not slurm.in_step(environ):
        return None
    distributed = any(name in chosen for name in JOB_SETTINGS)
    return "slurm" if distributed or slurm.tasks_in_step(environ) > 1 else None


def _rank_conflict(environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer | None:
    """A warning that RANK differs from this step's (a rank ran srun); None if it does not.

    The ranks of torch's agent and of cpulaunch (TORCHELASTIC_RUN_ID is set) are unrelated to the step.
    """
    other_launchers = ("TORCHELASTIC_RUN_ID", *MPIRUN_VARIABLES)
    independent = chosen.get("scheduler") == "none" or any(name in chosen for name in INSTANCE_SETTINGS)
    if "RANK" not in environ or independent or any(name in environ for name in other_launchers):
        return None
    if not slurm.in_step(environ):
        return None
    rank, tasks = environ["SLURM_PROCID"], slurm.tasks_in_step(environ)
    if tasks == 1 or (environ["RANK"], environ.get("WORLD_SIZE", str(tasks))) == (rank, str(tasks)):
        return None
    warning = (
        f"RANK={environ['RANK']} from the environment is used although srun started this process as rank {rank} of "
        f"{tasks}; --scheduler slurm uses srun's rank, --scheduler none silences this warning"
    )
    return Layer(origin="environment", values={}, warnings=(warning,))


def _is_complete(chosen: Mapping[str, Any]) -> bool:
    """Whether the command line has all that the scheduler's variables would add, as torchrun's has on each host."""
    placed = "rdzv_endpoint" in chosen or {"node_rank", "master_addr"} <= chosen.keys()
    return bool(chosen.get("standalone")) or ("nnodes" in chosen and placed)


def _check_hosts(task: SchedulerTask, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if --nnodes excludes the number of hosts that the scheduler started."""
    low, high = chosen.get("nnodes") or (1, 1 << 30)
    if task.hosts and not low <= task.hosts <= high:
        raise UsageError(
            f"--nnodes {low if low == high else f'{low}:{high}'} conflicts with {task.launcher}",
            value=f"it started processes on {task.hosts} host{'s' * (task.hosts != 1)}",
            source=task.sources.get("hosts", task.sources.get("world_size", "environment")),
            hint="drop --nnodes, or use --scheduler none to start separate jobs",
        )


# One process per host


def _host_layer(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    settings: Explained = {"scheduler": (task.scheduler, f"{task.launcher} started one process per host")}
    if task.hosts:
        settings["nnodes"] = _hosts(task)
    low, high = chosen.get("nnodes", (task.hosts, task.hosts))
    if not high:
        raise _unknown_hosts(task)
    if high > 1:
        settings["rdzv_id"] = f"{task.scheduler}-{task.job}", "the scheduler's name of the job"
        elastic = low < high or chosen.get("rdzv_backend", "static") != "static"
        settings |= (_elastic_rendezvous if elastic else _static_rendezvous)(task, environ, chosen)
    return _layer(task, chosen, settings)


def _unknown_hosts(task: SchedulerTask) -> UsageError:
    return UsageError(
        "cannot determine the number of hosts",
        value="PBS_NODEFILE is not readable on this host",
        source=f"started by {task.launcher}",
        hint="--nnodes N --master-addr HOST (OpenPBS keeps that file on the job's first host only)",
    )


def _static_rendezvous(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Explained:
    """The rendezvous of a fixed number of hosts, and the rank of this one."""
    settings: Explained = {"node_rank": (task.host_rank, f"rank of this host, from {_source(task, 'host_rank')}")}
    return settings if "rdzv_endpoint" in chosen else settings | _master(task, environ, chosen)


def _elastic_rendezvous(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Explained:
    """The rendezvous of a varying number of hosts: a store on the first one."""
    settings: Explained = {"rdzv_backend": ("c10d", "the number of hosts may change")}
    if chosen.get("rdzv_backend", "c10d") != "c10d" or "rdzv_endpoint" in chosen:
        return settings
    host, host_reason = _master_addr(task, environ, chosen)
    port, port_reason = _master_port(task, environ, chosen)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    is_first = "true" if task.host_rank == 0 else "false"
    settings["rdzv_endpoint"] = endpoint, f"{host_reason}; port {port_reason}"
    settings["rdzv_conf"] = (("is_host", is_first),), "the first host runs the store"
    return settings


# One process per rank


def _rank_layer(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    _check_rank(task, chosen)
    ranks = f"rank {task.rank} of {task.world_size}, local rank {task.local_rank} of {task.local_world_size}"
    sources = f"{_source(task, 'rank')}, {_source(task, 'local_rank')}"
    settings: Explained = {
        "scheduler": (task.scheduler, f"{task.launcher} started one process per rank: this is {ranks} ({sources})"),
        "nnodes": _hosts(task),
    }
    rank = SchedulerRank(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=task.local_rank,
        local_world_size=task.local_world_size,
        host_rank=task.rank // task.local_world_size if task.host_rank is None else task.host_rank,
        own_cpus=task.own_cpus and not CPU_SETTINGS & chosen.keys(),
    )
    return _layer(task, chosen, settings | _master(task, environ, chosen), rank=rank)


def _check_rank(task: SchedulerTask, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if --nproc-per-node differs from the number of ranks that the scheduler started here."""
    requested = chosen.get("nproc_per_node")
    if requested not in (None, task.local_world_size):
        raise UsageError(
            f"--nproc-per-node {requested} conflicts with {task.launcher}",
            value=f"it started {task.local_world_size} rank{'s' * (task.local_world_size != 1)} on this host",
            source=_source(task, "local_world_size" if task.scheduler == "mpi" else "tasks"),
            hint=f"drop --nproc-per-node, or let {task.launcher} start one process per host",
        )


# Both


def _layer(
    task: SchedulerTask, chosen: Mapping[str, Any], settings: Explained, *, rank: SchedulerRank | None = None
) -> Layer:
    """The layer, with warnings about the binding and about settings that are not applied."""
    ignored = [name for name in SUPERVISOR_SETTINGS if chosen.get(name)] if rank is not None else []
    warnings = [
        f"--{name.replace('_', '-')} is not applied: {task.launcher} starts the ranks, "
        "so cpulaunch does not supervise them"
        for name in ignored
    ]
    return Layer(
        origin="environment",
        values={name: value for name, (value, _) in settings.items()},
        reasons={name: reason for name, (_, reason) in settings.items()},
        scheduled_rank=rank,
        warnings=(*(() if CPU_SETTINGS & chosen.keys() else task.warnings), *warnings),
    )


def _hosts(task: SchedulerTask) -> tuple[tuple[int, int], str]:
    """--nnodes and its reason."""
    source = task.sources.get("hosts") or f"{_source(task, 'world_size')} and {_source(task, 'local_world_size')}"
    return (task.hosts, task.hosts), f"number of hosts, from {source}"


def _source(task: SchedulerTask, what: str) -> str:
    """The variable that a property was read from."""
    return task.sources.get(what, "unknown")


def _master(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Explained:
    """Host and port of rank 0's store. Raises: UsageError."""
    return {
        "master_addr": _master_addr(task, environ, chosen),
        "master_port": _master_port(task, environ, chosen),
    }


def _master_addr(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[str, str]:
    """The host of rank 0 and the reason. Raises: UsageError if it is unknown."""
    if "master_addr" in chosen:
        return chosen["master_addr"], "--master-addr"
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "MASTER_ADDR in the environment"
    if task.hosts == 1:
        return LOOPBACK, "all ranks are on this host"
    if task.first_host is not None:
        return task.first_host, f"the first host of {_source(task, 'nodes')}"
    raise UsageError(
        "cannot determine the host of rank 0",
        value=f"{task.launcher} sets no variable for it",
        hint="--master-addr HOST, or mpirun -x MASTER_ADDR=HOST (Intel MPI, MPICH: -genv MASTER_ADDR HOST)"
        if task.scheduler == "mpi"
        else "--master-addr HOST",
    )


def _master_port(task: SchedulerTask, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[int, str]:
    """The port of rank 0's store and the reason. Raises: UsageError if no variable identifies the job."""
    if "master_port" in chosen:
        return chosen["master_port"], "--master-port"
    text = environ.get("MASTER_PORT", "")
    if text:
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 1 << 16):
            raise UsageError(
                "MASTER_PORT is not a port number", value=repr(text), source="environment", hint="--master-port PORT"
            )
        return int(text), "MASTER_PORT in the environment"
    if task.port_seed is None:
        raise UsageError(
            "cannot choose a port for this job",
            value="no variable identifies the job",
            source=f"started by {task.launcher}",
            hint="--master-port PORT, or MASTER_PORT in the environment, the same for all ranks",
        )
    return port_of(task.port_seed)
