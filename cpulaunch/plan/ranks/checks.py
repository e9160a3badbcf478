"""Options of a job that cannot be meant together, and those that have no effect."""

from __future__ import annotations

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.endpoint import split_endpoint
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import LaunchRequest, setting_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NO_PORT = -1
SIGNALS = frozenset(
    f"SIG{name}"
    for name in (
        *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "IOT", "EMT", "BUS", "FPE", "USR1", "SEGV", "USR2", "PIPE"),
        *("ALRM", "TERM", "STKFLT", "CHLD", "CLD", "CONT", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM"),
        *("PROF", "WINCH", "IO", "POLL", "PWR", "INFO", "SYS", "BREAK", "RTMIN", "RTMAX"),
    )
)
"""Signals that a process can answer; KILL and STOP are not among them. Source: POSIX and Linux, signal(7)."""
JOB_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
        "TORCHELASTIC_ERROR_FILE",
    )
)
"""What a rank is told about itself, which nobody else may say."""
_FLAGS = {"MASTER_ADDR": "--master-addr", "MASTER_PORT": "--master-port", "ROLE_NAME": "--role"}


def check_kind(request: LaunchRequest) -> None:
    """Raises: UsageError if a launch is asked to be both a job of ranks and a number of instances."""
    settings = request.settings
    if not request.distributed:
        return
    for name in ("instances", "cores_per_instance", "instance_index"):
        if getattr(settings, name) is not None:
            raise UsageError(
                "instances are independent copies, ranks are one job",
                value=f"--{name.replace('_', '-')} with distributed options",
                source=setting_source(request, name),
                hint="--nproc-per-node N for ranks, or --instances N without distributed options",
            )
    for name, value in settings.env:
        if name in JOB_VARIABLES:
            raise UsageError(
                f"{name} is the job's own",
                value=value,
                source="--env",
                hint=f"{_FLAGS[name]} sets it" if name in _FLAGS else "every rank is told its own",
            )


def check_job(request: LaunchRequest, local_world_size: int) -> None:
    """Raises: UsageError if the options contradict each other or name what is not there."""
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
            raise _refused(request, "nnodes", "--standalone is one host", f"{fewest}:{most}", "drop --standalone")
        return
    if backend != "static":
        return
    if fewest < most:
        hint = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, where HOST is one of the job's"
        what = "the static rendezvous waits for a fixed number of hosts"
        raise _refused(request, "nnodes", what, f"{fewest}:{most}", hint)
    if (settings.node_rank or 0) >= most:
        hint = f"hosts of --nnodes {most} count from 0 to {most - 1}"
        raise _refused(request, "node_rank", "no such host in the job", settings.node_rank, hint)


def _check_endpoint(request: LaunchRequest) -> None:
    settings = request.settings
    backend = settings.rdzv_backend or "static"
    if settings.standalone or settings.rdzv_endpoint is None or backend not in ("static", "c10d", "etcd", "etcd-v2"):
        return
    _, port = split_endpoint(settings.rdzv_endpoint, default_port=NO_PORT)
    if port == NO_PORT and backend == "static":
        what = "the static rendezvous needs a port"
        raise _refused(request, "rdzv_endpoint", what, settings.rdzv_endpoint, "--rdzv-endpoint HOST:29500")


def _check_local_ranks(request: LaunchRequest, local_world_size: int) -> None:
    """Raises: UsageError if output is asked for of ranks that this host has not."""
    settings = request.settings
    for name in ("redirects", "tee", "local_ranks_filter"):
        value = getattr(settings, name)
        asked = frozenset(rank for rank, _ in value) if isinstance(value, tuple) else value
        absent = frozenset(rank for rank in asked if rank >= local_world_size) if isinstance(asked, frozenset) else ()
        if absent:
            hint = f"local ranks count from 0 to {local_world_size - 1}"
            raise _refused(request, name, "no such local rank", format_cpulist(absent), hint)
    if settings.show is not None and settings.local_ranks_filter is not None:
        raise UsageError(
            "two options say whose output is shown",
            value="--show and --local-ranks-filter",
            source=setting_source(request, "local_ranks_filter"),
            hint="drop one",
        )


def _check_signals(request: LaunchRequest) -> None:
    for name in request.settings.signals_to_handle:
        if name not in SIGNALS:
            what = "no signal that can be handled"
            raise _refused(request, "signals_to_handle", what, name, "--signals-to-handle SIGTERM,SIGINT,SIGUSR1")


def _refused(request: LaunchRequest, name: str, what: str, value: object, hint: str) -> UsageError:
    return UsageError(
        what, value=f"--{name.replace('_', '-')} {value}", source=setting_source(request, name), hint=hint
    )


def job_warnings(request: LaunchRequest) -> Iterator[str]:
    """Options that have no effect here, or hardly the one that is meant."""
    settings = request.settings
    backend = "c10d" if settings.standalone else settings.rdzv_backend or "static"
    several = (settings.nnodes or (1, 1))[1] > 1
    for name in ("master_addr", "master_port", "node_rank"):
        if request.origin(name) == "cli" and backend != "static" and getattr(settings, name) != 0:
            yield f"--{name.replace('_', '-')} is not used: it belongs to the static rendezvous, this is {backend}"
    if settings.standalone and several:
        yield "--nnodes is not used: nobody can join a job with --standalone"
    elif several and backend == "static" and not settings.rdzv_endpoint and settings.master_addr is None:
        yield "no --master-addr: the hosts look for each other at 127.0.0.1, which is each host itself"
    elif several and backend == "c10d" and not settings.rdzv_endpoint:
        yield "no --rdzv-endpoint: the hosts look for each other at localhost, which is each host itself"


def check_watched(request: LaunchRequest, *, native: bool) -> None:
    """Raises: UsageError if something is to be told of all ranks that only cpulaunch's own engine can tell."""
    for name in ("report", "metric", "start_barrier"):
        if not native and getattr(request.settings, name):
            alone = "for ranks that a scheduler starts one by one"
            raise UsageError(
                f"not available {'for a job of several hosts' if request.scheduled_rank is None else alone}",
                value=f"--{name.replace('_', '-')}",
                source=setting_source(request, name),
                hint="it works with the ranks of one host",
            )


GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def job_grace(request: LaunchRequest) -> float:
    """Seconds between SIGTERM and SIGKILL: --shutdown-timeout, --grace, torch's variable. Raises: UsageError."""
    settings = request.settings
    asked, text = settings.shutdown_timeout, request.environ.get(GRACE, "")
    if asked is not None:
        if request.origin("grace") == "cli" and settings.grace != asked:
            what = "it says something else than --grace"
            raise _refused(request, "shutdown_timeout", what, asked, "drop one of the two")
        return float(asked)
    if request.origin("grace") == "cli" or not (text.isascii() and text.isdigit()):
        return settings.grace
    return float(text)
