"""A distributed job as this host sees it: torchrun's options turned into one JobPlan.

Source: torch 2.13, torch/distributed/run.py and torch/distributed/elastic.
"""

from __future__ import annotations

from cpulaunch.errors import UsageError
from cpulaunch.plan.model import JobPlan, Rendezvous, StreamsPlan
from cpulaunch.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from cpulaunch.settings import Settings, Streams

DEFAULT_PORT = 29500
"""Of torch's static rendezvous."""


def decide_job(request: LaunchRequest, local_world_size: int) -> JobPlan:
    """The job of a request with so many ranks on this host. Raises: UsageError if the options contradict each other."""
    settings = request.settings
    hosts = settings.nnodes or (1, 1)
    engine = _engine(settings, hosts)
    host_rank = settings.node_rank or 0
    if host_rank >= hosts[1]:
        raise UsageError(
            "no such host in the job",
            value=f"--node-rank {host_rank}",
            source="command line",
            hint=f"hosts of --nnodes {hosts[1]} count from 0 to {hosts[1] - 1}",
        )
    return JobPlan(
        engine=engine,
        hosts=hosts,
        host_rank=host_rank,
        local_world_size=local_world_size,
        role=settings.role,
        rendezvous=_rendezvous(settings, hosts),
        master_addr=settings.master_addr or "127.0.0.1",
        master_port=_master_port(settings, engine),
        max_restarts=settings.max_restarts,
        streams=StreamsPlan(
            redirects=by_local_rank(settings.redirects, local_world_size),
            tee=by_local_rank(settings.tee, local_world_size),
            filters=(settings.duplicate_stdout_filters, settings.duplicate_stderr_filters),
            prefix=request.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        ),
        local_addr=settings.local_addr,
        monitor_interval_seconds=settings.monitor_interval,
        signals=settings.signals_to_handle,
        run_path=settings.run_path,
        virtual_local_rank=settings.virtual_local_rank,
        start_method=settings.start_method,
        event_log_handler=settings.event_log_handler,
        logs_specs=settings.logs_specs,
    )


def by_local_rank(streams: Streams, local_world_size: int) -> tuple[int, ...]:
    """The number for each local rank. Source: torch elastic, to_map."""
    if isinstance(streams, int):
        return (streams,) * local_world_size
    chosen = dict(streams)
    return tuple(chosen.get(rank, 0) for rank in range(local_world_size))


def _engine(settings: Settings, hosts: tuple[int, int]) -> Literal["native", "elastic"]:
    """Native on one host, unless a plug-in of torch elastic was asked for."""
    plugged_in = settings.logs_specs is not None or settings.event_log_handler != "null"
    return "elastic" if hosts[1] > 1 or plugged_in else "native"


def _rendezvous(settings: Settings, hosts: tuple[int, int]) -> Rendezvous:
    chosen = settings.rdzv_backend or "static"
    alone = chosen == "static" and not settings.rdzv_endpoint and settings.master_port is None and hosts[1] == 1
    if settings.standalone or alone:
        return Rendezvous(backend="c10d", endpoint="localhost:0", id=None, conf=settings.rdzv_conf)
    endpoint = settings.rdzv_endpoint or ""
    if chosen == "static" and not endpoint:
        endpoint = f"{settings.master_addr or '127.0.0.1'}:{settings.master_port or DEFAULT_PORT}"
    return Rendezvous(backend=chosen, endpoint=endpoint, id=settings.rdzv_id or "none", conf=settings.rdzv_conf)


def _master_port(settings: Settings, engine: Literal["native", "elastic"]) -> int | None:
    """The port asked for; None for a free one."""
    return settings.master_port or None
