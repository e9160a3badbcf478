"""torch elastic's LaunchConfig for a job, with those fields that the installed torch has (2.5 and newer)."""

from __future__ import annotations

import math
from functools import partial

from cpulaunch.launch.hosts.agent.logs import open_log_folder
from cpulaunch.launch.hosts.agent.messages import AgentConfig
from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NEWER_FIELDS: dict[str, tuple[str | None, Any]] = {
    "signals_to_handle": ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    "duplicate_stdout_filters": ("--duplicate-stdout-filters", []),
    "duplicate_stderr_filters": ("--duplicate-stderr-filters", []),
    "virtual_local_rank": ("--virtual-local-rank", False),
    "shutdown_timeout": (None, None),  # Without it torch reads its variable, which need not be a number.
    "event_log_handler": ("--event-log-handler", "null"),
    "log_line_prefix_template": ("--log-line-prefix-template (TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)", None),
}
"""Fields that not every torch since 2.5 has: the option that sets each (None: it is best effort), torch's default."""


def launch_config(config: AgentConfig, rendezvous_conf: dict[str, Any], logs_specs: Any) -> Any:
    """torch's LaunchConfig. Raises: UsageError if this torch lacks an option that the user gave."""
    import torch
    from torch.distributed.launcher.api import LaunchConfig

    job = config.job
    fewest, most = job.hosts
    return LaunchConfig(
        min_nodes=fewest,
        max_nodes=most,
        nproc_per_node=job.local_world_size,
        run_id=job.rendezvous.id,
        role=job.role,
        rdzv_backend=job.rendezvous.backend,
        rdzv_endpoint=job.rendezvous.endpoint,
        rdzv_configs=rendezvous_conf,
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_interval_seconds,
        start_method=job.start_method,
        local_addr=job.local_addr or ("127.0.0.1" if most == 1 else None),
        logs_specs=logs_specs,
        **supported_values(
            newer_values(config), frozenset(LaunchConfig.__dataclass_fields__), version=torch.__version__
        ),
    )


def newer_values(config: AgentConfig) -> dict[str, Any]:
    """The job's values of NEWER_FIELDS."""
    job, streams = config.job, config.job.streams
    return {
        "signals_to_handle": ",".join(job.signals),
        "duplicate_stdout_filters": list(streams.filters[0]),
        "duplicate_stderr_filters": list(streams.filters[1]),
        "virtual_local_rank": job.virtual_local_rank,
        "shutdown_timeout": math.ceil(config.grace_seconds),
        "event_log_handler": job.event_log_handler,
        "log_line_prefix_template": streams.prefix,
    }


def supported_values(values: dict[str, Any], supported: frozenset[str], *, version: str) -> dict[str, Any]:
    """Those of `values` that differ from torch's defaults, limited to the fields that the installed torch has.

    Raises: UsageError if an option has such a value and torch has no field for it.
    """
    given = {name: value for name, value in values.items() if value != NEWER_FIELDS[name][1]}
    for name in given:
        option = NEWER_FIELDS[name][0]
        if option is not None and name not in supported:
            raise UsageError(
                "the installed torch does not support an option",
                value=option,
                source=f"torch {version}",
                hint=f"omit {option}, or install a newer torch",
            )
    return {name: value for name, value in given.items() if name in supported}


def make_logs_specs(config: AgentConfig) -> Any:
    """Where torch writes the ranks' output: its own layout, or that of --logs-specs.

    Effect: the folder of the logs exists. Raises: LaunchError, UsageError.
    """
    from torch.distributed.elastic.multiprocessing import Std

    from cpulaunch.launch.hosts.agent.failures import RecordingLogsSpecs, count_attempts

    name, streams = config.job.logs_specs, config.job.streams
    make = None if name is None else _registered_logs_specs(name)
    folder = open_log_folder(config.log_dir, str(config.job.rendezvous.id))
    own = partial(RecordingLogsSpecs, own_folder=folder.shown)
    specs = (make or own)(
        log_dir=folder.path,
        redirects={rank: Std(number) for rank, number in enumerate(streams.redirects)},
        tee={rank: Std(number) for rank, number in enumerate(streams.tee)},
        local_ranks_filter=None if config.shown is None else set(config.shown),
    )
    return specs if make is None else count_attempts(specs)


def _registered_logs_specs(name: str) -> Any:
    """The class registered under this name. Source: torch 2.13, torch/distributed/run.py, torchrun.logs_specs."""
    from importlib.metadata import entry_points

    found = list(entry_points().select(group="torchrun.logs_specs", name=name))
    if found:
        return found[0].load()
    raise UsageError(
        "unknown log specification",
        value=name,
        source="--logs-specs",
        hint="an installed package must register it as an entry point of torchrun.logs_specs",
    )


def check_event_handler(name: str) -> None:
    """Effect: none. Raises: UsageError if torch has no event log handler of this name."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        raise UsageError(
            "unknown event log handler", value=name, source="--event-log-handler", hint="torch has null and console"
        ) from None
