"""What a scheduler says, as a layer of settings: this process is one host of the job, or one rank of it."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Layer, Member
from cpulaunch.records.settings import JOB_SETTINGS
from cpulaunch.schedulers import mpi, pbs, slurm
from cpulaunch.schedulers.task import Machine, Started, port_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    Told: TypeAlias = "dict[str, tuple[Any, str]]"
    """By setting: its value, and why."""

BACKENDS = {"slurm": slurm.started, "mpi": mpi.started, "pbs": pbs.started}
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
    started = BACKENDS[name](environ, machine)
    agent = started.one_per_host and (name != "mpi" or "nproc_per_node" in chosen)
    if agent and _complete(chosen):
        return None
    _check_hosts(started, chosen)
    return _host_layer(started, environ, chosen) if agent else _member_layer(started, environ, chosen)


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


def _check_hosts(started: Started, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if --nnodes does not allow for the hosts the scheduler started."""
    low, high = chosen.get("nnodes") or (1, 1 << 30)
    if started.hosts and not low <= started.hosts <= high:
        raise UsageError(
            f"--nnodes does not fit what {started.starter} started",
            value=f"{low if low == high else f'{low}:{high}'} hosts asked for, {started.hosts} started",
            source=started.sources.get("hosts", started.sources.get("world_size", "your environment")),
            hint="leave --nnodes out, or --scheduler none to start a job on every host for itself",
        )


# One process per host


def _host_layer(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    why = f"{started.starter} started a process for each host, and this is one"
    told: Told = {"scheduler": (started.scheduler, why)}
    if started.hosts:
        told["nnodes"] = _hosts(started)
    low, high = chosen.get("nnodes", (started.hosts, started.hosts))
    if not high:
        raise _no_host_list(started)
    if high > 1:
        told["rdzv_id"] = f"{started.scheduler}-{started.job}", "the scheduler's name of the job"
        elastic = low < high or chosen.get("rdzv_backend", "static") != "static"
        told |= (_meeting_elastic if elastic else _meeting_static)(started, environ, chosen)
    return _layer(started, chosen, told)


def _no_host_list(started: Started) -> UsageError:
    return UsageError(
        "how many hosts the job has is not to be found out here",
        value="PBS_NODEFILE cannot be read on this host",
        source=f"started by {started.starter}",
        hint="--nnodes N --master-addr HOST (OpenPBS keeps that file on the job's first host only)",
    )


def _meeting_static(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where a fixed number of hosts meet, and which of them this is."""
    told: Told = {"node_rank": (started.host_rank, f"this host's number: {_source(started, 'host_rank')}")}
    return told if "rdzv_endpoint" in chosen else told | _master(started, environ, chosen)


def _meeting_elastic(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where hosts meet that may come and go: at a store on the first one."""
    told: Told = {"rdzv_backend": ("c10d", "hosts may come and go")}
    if chosen.get("rdzv_backend", "c10d") != "c10d" or "rdzv_endpoint" in chosen:
        return told
    host, why_host = _master_addr(started, environ, chosen)
    port, why_port = _master_port(started, environ, chosen)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    first = "true" if started.host_rank == 0 else "false"
    told["rdzv_endpoint"] = endpoint, f"{why_host}; port {why_port}"
    told["rdzv_conf"] = (("is_host", first),), "the first host keeps the store"
    return told


# One process per rank


def _member_layer(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Layer:
    _check_member(started, chosen)
    place = f"{started.rank} of {started.world_size}, {started.local_rank} of {started.local_world_size} on this host"
    read = f"{_source(started, 'rank')}, {_source(started, 'local_rank')}"
    told: Told = {
        "scheduler": (
            started.scheduler,
            f"{started.starter} started a process for each rank: this is {place} ({read})",
        ),
        "nnodes": _hosts(started),
    }
    member = Member(
        rank=started.rank,
        world_size=started.world_size,
        local_rank=started.local_rank,
        local_world_size=started.local_world_size,
        host_rank=started.rank // started.local_world_size if started.host_rank is None else started.host_rank,
        own_cpus=started.own_cpus and not CHOOSING & chosen.keys(),
    )
    return _layer(started, chosen, told | _master(started, environ, chosen), member=member)


def _check_member(started: Started, chosen: Mapping[str, Any]) -> None:
    """Raises: UsageError if ranks were asked for beside those that are there."""
    asked = chosen.get("nproc_per_node")
    if asked not in (None, started.local_world_size):
        raise UsageError(
            f"{started.starter} started {started.local_world_size} process"
            f"{'es' * (started.local_world_size > 1)} on this host, each is a rank already",
            value=f"--nproc-per-node {asked}",
            source=_source(started, "local_world_size" if started.scheduler == "mpi" else "tasks"),
            hint=f"drop --nproc-per-node, or let {started.starter} start one process per host",
        )


# What both have in common


def _layer(started: Started, chosen: Mapping[str, Any], told: Told, *, member: Member | None = None) -> Layer:
    """The layer, with warnings of what cannot be done."""
    lost = [name for name in AGENTS_ONLY if chosen.get(name)] if member is not None else []
    warnings = [
        f"--{name.replace('_', '-')} is not applied: {started.starter} starts the ranks, and cpulaunch becomes them"
        for name in lost
    ]
    return Layer(
        origin="environment",
        values={name: value for name, (value, _) in told.items()},
        reasons={name: reason for name, (_, reason) in told.items()},
        member=member,
        warnings=(*(() if CHOOSING & chosen.keys() else started.warnings), *warnings),
    )


def _hosts(started: Started) -> tuple[tuple[int, int], str]:
    source = (
        started.sources.get("hosts") or f"{_source(started, 'world_size')} and {_source(started, 'local_world_size')}"
    )
    return (started.hosts, started.hosts), f"hosts that {started.starter} started on: {source}"


def _master(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> Told:
    """Where rank 0 listens. Raises: UsageError."""
    return {
        "master_addr": _master_addr(started, environ, chosen),
        "master_port": _master_port(started, environ, chosen),
    }


def _source(started: Started, what: str) -> str:
    return started.sources.get(what, "not told")


def _master_addr(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Where rank 0 is, and who says so. Raises: UsageError if nobody does."""
    if "master_addr" in chosen:
        return chosen["master_addr"], "--master-addr"
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "MASTER_ADDR in your environment"
    if started.hosts == 1:
        return LOOPBACK, "all ranks are on this host"
    if started.master is not None:
        return started.master, f"the first host of {_source(started, 'nodes')}"
    raise UsageError(
        "rank 0's host is not known",
        value="no variable names it",
        source=f"started by {started.starter}",
        hint="--master-addr HOST, or mpirun -x MASTER_ADDR=HOST (Intel MPI, MPICH: -genv MASTER_ADDR HOST)"
        if started.scheduler == "mpi"
        else "--master-addr HOST",
    )


def _master_port(started: Started, environ: Mapping[str, str], chosen: Mapping[str, Any]) -> tuple[int, str]:
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
    if started.port_id is None:
        raise UsageError(
            "no port that only this job uses",
            value="no variable names the job",
            source=f"started by {started.starter}",
            hint="--master-port PORT, or MASTER_PORT in the environment, the same for all ranks",
        )
    return port_of(started.port_id)
