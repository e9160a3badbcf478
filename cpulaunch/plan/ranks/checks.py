"""Options of a job that contradict each other, and options that have no effect."""

from __future__ import annotations

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.endpoint import rendezvous_address, split_endpoint
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import LaunchRequest, setting_source
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.value_types import MAX_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = frozenset(
    f"SIG{name}"
    for name in (
        *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "IOT", "EMT", "BUS", "FPE", "USR1", "SEGV", "USR2", "PIPE"),
        *("ALRM", "TERM", "STKFLT", "CHLD", "CLD", "CONT", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM"),
        *("PROF", "WINCH", "IO", "POLL", "PWR", "INFO", "SYS", "BREAK", "RTMIN", "RTMAX"),
    )
)
"""Signals that a process can handle, so all but KILL and STOP. Source: POSIX and Linux, signal(7)."""
JOB_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
        "TORCHELASTIC_ERROR_FILE",
    )
)
"""Variables that describe a rank to itself; --env must not set them."""
_FLAG_OF_VARIABLE = {"MASTER_ADDR": "--master-addr", "MASTER_PORT": "--master-port", "ROLE_NAME": "--role"}


def check_kind(request: LaunchRequest) -> None:
    """Raises: UsageError if a job of ranks has options of instances, or if --env sets a variable of the job."""
    settings = request.settings
    if not request.distributed:
        return
    for name in ("instances", "cores_per_instance", "instance_index"):
        if getattr(settings, name) is not None:
            raise UsageError(
                "cannot start instances (independent copies) and ranks (one job) together",
                value=f"--{name.replace('_', '-')} with distributed options",
                source=setting_source(request, name),
                hint="--nproc-per-node N for ranks, or --instances N without distributed options",
            )
    for name, _ in settings.env:  # What it is set to may be a secret.
        if name in JOB_VARIABLES:
            raise UsageError(
                f"cpulaunch sets {name} for every rank",
                source="--env",
                hint=f"use {flag}" if (flag := _FLAG_OF_VARIABLE.get(name)) else f"drop --env {name}",
            )


def check_job(request: LaunchRequest, local_world_size: int) -> None:
    """Raises: UsageError if options contradict each other, or name a host, rank or signal that does not exist."""
    _check_hosts(request)
    _check_endpoint(request)
    _check_local_ranks(request, local_world_size)
    _check_signals(request)


def _check_hosts(request: LaunchRequest) -> None:
    settings = request.settings
    fewest, most = settings.nnodes or (1, 1)
    backend = settings.rdzv_backend or "static"
    if settings.standalone:
        if fewest > 1:
            raise _error(request, "nnodes", "--standalone starts one host only", "drop --standalone")
        return
    if backend != "static":
        return
    if fewest < most:
        hint = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, where HOST belongs to the job"
        what = "the static rendezvous needs a fixed number of hosts"
        raise _error(request, "nnodes", what, hint)
    if (settings.node_rank or 0) >= most:
        hint = f"--nnodes {most} has hosts 0 to {most - 1}" if most > 1 else "--node-rank needs --nnodes 2 or more"
        raise _error(request, "node_rank", "no such host in the job", hint)


def _check_endpoint(request: LaunchRequest) -> None:
    settings = request.settings
    backend = settings.rdzv_backend or "static"
    if settings.standalone or settings.rdzv_endpoint is None or backend not in ("static", "c10d", "etcd", "etcd-v2"):
        return
    address = rendezvous_address(settings.rdzv_endpoint, backend=backend, conf=dict(settings.rdzv_conf))
    _, port = split_endpoint(address, default_port=None)
    if port is None and backend == "static":
        what = "the static rendezvous needs a port"
        raise _error(request, "rdzv_endpoint", what, "--rdzv-endpoint HOST:29500")


def _check_local_ranks(request: LaunchRequest, local_world_size: int) -> None:
    """Raises: UsageError if an option on output names a local rank that this host does not have."""
    settings = request.settings
    for name in ("redirects", "tee", "local_ranks_filter"):
        value = getattr(settings, name)
        named = frozenset(rank for rank, _ in value) if isinstance(value, tuple) else value
        absent = frozenset(rank for rank in named if rank >= local_world_size) if isinstance(named, frozenset) else ()
        if absent:
            present = f"ranks 0 to {local_world_size - 1}" if local_world_size > 1 else "rank 0 only"
            raise _error(
                request, name, "no such local rank", f"this host has local {present}", value=format_cpulist(absent)
            )
    if settings.show is not None and settings.local_ranks_filter is not None:
        raise UsageError(
            "two options choose whose output is shown",
            value="--show and --local-ranks-filter",
            source=setting_source(request, "local_ranks_filter"),
            hint="drop one of them",
        )


def _check_signals(request: LaunchRequest) -> None:
    for name in request.settings.signals_to_handle:
        if name not in SIGNALS:
            what = "not a signal that a process can handle"
            raise _error(request, "signals_to_handle", what, "--signals-to-handle SIGTERM,SIGINT,SIGUSR1", value=name)


def _error(request: LaunchRequest, name: str, problem: str, hint: str, *, value: str | None = None) -> UsageError:
    """The error about a setting. `value`: the part of the setting's value that is wrong; None: all of it."""
    spec = setting_specs()[name]
    words = spec.arguments(getattr(request.settings, name)) if value is None else [spec.flag, value]
    return UsageError(problem, value=" ".join(words), source=setting_source(request, name), hint=hint)


def job_warnings(request: LaunchRequest) -> Iterator[str]:
    """Warnings about options that have no effect in this job, and about missing addresses of several hosts."""
    settings = request.settings
    backend = "c10d" if settings.standalone else settings.rdzv_backend or "static"
    several = (settings.nnodes or (1, 1))[1] > 1
    for name in ("master_addr", "master_port", "node_rank"):
        if request.origin(name) == "cli" and backend != "static" and getattr(settings, name) != 0:
            yield f"--{name.replace('_', '-')} is not used: it is for the static rendezvous, this one is {backend}"
    if settings.standalone and several:
        yield "--nnodes is not used: no other host can join a job with --standalone"
    elif several and backend == "static" and not settings.rdzv_endpoint and settings.master_addr is None:
        yield "no --master-addr: every host looks for the others at 127.0.0.1, which is that host itself"
    elif several and backend == "c10d" and not settings.rdzv_endpoint:
        yield "no --rdzv-endpoint: every host looks for the others at localhost, which is that host itself"


def check_engine_options(request: LaunchRequest, *, native: bool) -> None:
    """Raises: UsageError if an option needs cpulaunch's own engine (`native`) and the job has another."""
    for name in ("report", "html", "metric", "start_barrier"):
        if not native and getattr(request.settings, name):
            who = "a job of several hosts" if request.scheduled_rank is None else "ranks that a scheduler starts"
            raise UsageError(
                f"not available for {who}",
                value=f"--{name.replace('_', '-')}",
                source=setting_source(request, name),
                hint="start all ranks on one host, with one cpulaunch",
            )


GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def job_grace(request: LaunchRequest) -> float:
    """Seconds between SIGTERM and SIGKILL: of --shutdown-timeout, --grace or torch's variable.

    Raises: UsageError if the two flags differ.
    """
    settings = request.settings
    timeout, text = settings.shutdown_timeout, request.environ.get(GRACE_VARIABLE, "")
    if timeout is not None:
        if request.origin("grace") == "cli" and settings.grace != timeout:
            what = f"--shutdown-timeout differs from --grace {settings.grace:g}"
            raise _error(request, "shutdown_timeout", what, "drop one of the two")
        return float(timeout)
    if request.origin("grace") == "cli" or not (text.isascii() and text.isdigit()):
        return settings.grace
    return min(float(text), MAX_SECONDS)
