"""The JobPlan of a distributed job on this host, from torchrun's options.

Source: torch 2.13, torch/distributed/run.py and torch/distributed/elastic.
"""

from __future__ import annotations

from cpulaunch.plan.ranks.checks import check_job
from cpulaunch.plan.ranks.templates import substitute
from cpulaunch.records.endpoint import is_file_store, rendezvous_address, split_endpoint, with_brackets
from cpulaunch.records.plan import JobPlan, Note, Rendezvous, StreamsPlan
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from cpulaunch.records.settings import Settings, Streams

LOOPBACK = "127.0.0.1"
"""Not "localhost", whose IPv6 address torch's clients try first, and at which another user may listen."""
DEFAULT_PORT = 29500
"""The port of torch's static rendezvous."""
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
DEFAULT_PREFIX = "[${role_name}${local_rank}]:"
"""Source: torch elastic, TailLog."""
KNOWN_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
"""The rendezvous backends of torch; a job of one host needs none of them."""


def decide_job(request: LaunchRequest, local_world_size: int) -> JobPlan:
    """The job of a request with `local_world_size` ranks on this host. Raises: UsageError if options contradict."""
    check_job(request, local_world_size)
    settings = request.settings
    hosts = job_hosts(settings)
    rendezvous = _rendezvous(settings, hosts)
    scheduled_rank = request.scheduled_rank
    master_addr, master_port = _master(rendezvous, one_host=hosts[1] == 1)
    static = rendezvous.backend == "static"
    host_rank = settings.node_rank or 0 if static else 0
    return JobPlan(
        engine="scheduler" if scheduled_rank is not None else _engine(settings, hosts),
        hosts=hosts,
        host_rank=host_rank if scheduled_rank is None else scheduled_rank.host_rank,
        local_world_size=local_world_size,
        role=settings.role,
        rendezvous=rendezvous,
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=settings.max_restarts,
        streams=_streams(request, local_world_size),
        local_addr=settings.local_addr or request.endpoint_address,
        monitor_interval_seconds=settings.monitor_interval,
        signals=settings.signals_to_handle,
        run_path=settings.run_path,
        virtual_local_rank=settings.virtual_local_rank,
        start_method=settings.start_method,
        event_log_handler=settings.event_log_handler,
        logs_specs=settings.logs_specs,
        interpreter="" if request.program is None else request.program.interpreter,
        scheduled_rank=scheduled_rank,
    )


def by_local_rank(streams: Streams, local_world_size: int) -> tuple[int, ...]:
    """The number that selects the streams of each local rank. Source: torch elastic, to_map."""
    if isinstance(streams, int):
        return (streams,) * local_world_size
    chosen = dict(streams)
    return tuple(chosen.get(rank, 0) for rank in range(local_world_size))


def _streams(request: LaunchRequest, local_world_size: int) -> StreamsPlan:
    """Where the output of each rank goes. --log-dir without --redirects and --tee shows and writes both streams."""
    settings = request.settings
    unset = "redirects" not in request.origins and "tee" not in request.origins
    tee = 3 if settings.log_dir is not None and unset else settings.tee
    return StreamsPlan(
        redirects=by_local_rank(settings.redirects, local_world_size),
        tee=by_local_rank(tee, local_world_size),
        filters=(settings.duplicate_stdout_filters, settings.duplicate_stderr_filters),
        prefix=_template(request),
        prefixes=tuple(_prefix(request, local_rank) for local_rank in range(local_world_size)),
    )


def _prefix(request: LaunchRequest, local_rank: int) -> str:
    """The prefix of this rank's lines on the terminal, if all ranks are on this host."""
    number = str(local_rank)
    values = {"role_name": request.settings.role, "local_rank": number, "rank": number}
    return substitute(_template(request) or DEFAULT_PREFIX, values)


def _template(request: LaunchRequest) -> str | None:
    """The template of prefixes, if it is not torchrun's own. Source: torch 2.15, torch/distributed/run.py."""
    return request.settings.log_line_prefix_template or request.environ.get(PREFIX_VARIABLE)


def job_hosts(settings: Settings) -> tuple[int, int]:
    """The fewest and the most hosts; one for a standalone job."""
    return (1, 1) if settings.standalone else settings.nnodes or (1, 1)


def _engine(settings: Settings, hosts: tuple[int, int]) -> Literal["native", "elastic"]:
    """Native on one host, unless an option names a plug-in of torch elastic."""
    return "elastic" if hosts[1] > 1 or _elastic_plugin_option(settings) else "native"


def _elastic_plugin_option(settings: Settings) -> str | None:
    """The option that names a plug-in of torch elastic; None without one."""
    if settings.logs_specs is not None:
        return f"--logs-specs {settings.logs_specs}"
    if settings.event_log_handler != "null":
        return f"--event-log-handler {settings.event_log_handler}"
    if settings.rdzv_backend not in (None, *KNOWN_BACKENDS) and not settings.standalone:
        return f"--rdzv-backend {settings.rdzv_backend}"
    return None


def _rendezvous(settings: Settings, hosts: tuple[int, int]) -> Rendezvous:
    chosen = settings.rdzv_backend or "static"
    alone = chosen == "static" and not settings.rdzv_endpoint and settings.master_port is None and hosts[1] == 1
    in_file = is_file_store(dict(settings.rdzv_conf))
    if settings.standalone or alone:
        # An address would be the name of a file in the working directory, which torch makes under --standalone.
        endpoint = "" if in_file else f"{LOOPBACK}:0"
        return Rendezvous(backend="c10d", endpoint=endpoint, id=None, conf=settings.rdzv_conf)
    endpoint = settings.rdzv_endpoint or ""
    if chosen == "static" and not endpoint:
        port = DEFAULT_PORT if settings.master_port is None else settings.master_port
        host = settings.master_addr or LOOPBACK
        endpoint = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    endpoint = endpoint if in_file and chosen == "c10d" else with_brackets(endpoint)
    return Rendezvous(backend=chosen, endpoint=endpoint, id=settings.rdzv_id or "none", conf=settings.rdzv_conf)


def _master(rendezvous: Rendezvous, *, one_host: bool) -> tuple[str, int | None]:
    """Address and port of rank 0's store; port None: a free one at every start.

    Source: torch elastic 2.13: the static rendezvous' endpoint; with others the endpoint's host and a free port.
    """
    address = rendezvous_address(rendezvous.endpoint, backend=rendezvous.backend, conf=dict(rendezvous.conf))
    host, port = split_endpoint(address or "localhost", default_port=DEFAULT_PORT)
    host = LOOPBACK if one_host and host == "localhost" else host
    return host, (port or None) if rendezvous.backend == "static" else None


def world_size(job: JobPlan) -> int:
    """The number of ranks on all hosts, if the largest number of hosts takes part."""
    if job.scheduled_rank is not None:
        return job.scheduled_rank.world_size
    return job.local_world_size * job.hosts[1]


def global_rank(job: JobPlan, local_rank: int) -> int | None:
    """The rank in the job; None if the rendezvous decides it."""
    if job.scheduled_rank is not None:
        return job.scheduled_rank.rank
    if job.engine == "native" or (job.rendezvous.backend == "static" and job.hosts[1] > 1):
        return job.host_rank * job.local_world_size + local_rank
    return None


def job_notes(request: LaunchRequest, job: JobPlan) -> tuple[Note, ...]:
    """The notes on the engine that starts the ranks, and on the rendezvous."""
    if job.engine == "elastic":
        value = " ".join(filter(None, (job.rendezvous.backend, job.rendezvous.endpoint)))
        purpose = "where the hosts find each other"
    else:
        value = f"{job.master_addr}, {'a free port' if job.master_port is None else f'port {job.master_port}'}"
        purpose = "rank 0 listens there for the others"
    origin = next((request.origin(name) for name in _RENDEZVOUS_SETTINGS if name in request.origins), "default")
    return (
        Note(setting="engine", value=job.engine, origin="default", reason=_engine_reason(request.settings, job)),
        Note(setting="rendezvous", value=value, origin=origin, reason=purpose),
    )


_RENDEZVOUS_SETTINGS = ("rdzv_endpoint", "rdzv_backend", "master_addr", "master_port", "standalone")


def _engine_reason(settings: Settings, job: JobPlan) -> str:
    if job.engine == "native":
        return "one host: cpulaunch itself starts and restarts the ranks, without torch"
    if job.engine == "scheduler":
        return "a scheduler starts one process for each rank; this is one of them"
    option = _elastic_plugin_option(settings)
    if option:
        return f"torch's agent starts the ranks, because {option} is a plug-in of torch elastic"
    return "several hosts: torch's agent starts the ranks and cpulaunch binds them"
