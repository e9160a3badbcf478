"""torch elastic's LaunchConfig for a job, with whatever fields the installed torch has (2.5 and newer)."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LATER_FIELDS = {
    "signals_to_handle": "--signals-to-handle",
    "duplicate_stdout_filters": "--duplicate-stdout-filters",
    "duplicate_stderr_filters": "--duplicate-stderr-filters",
    "virtual_local_rank": "--virtual-local-rank",
    "shutdown_timeout": None,
    "event_log_handler": "--event-log-handler",
    "log_line_prefix_template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
}
"""Fields that not every torch since 2.5 has, and what asks for each; None: nothing is lost without."""


TORCHS_OWN = {"signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "event_log_handler": "null"}
"""Defaults that need no field."""


def launch_config(job: dict[str, Any], conf: dict[str, Any], logs_specs: Any) -> Any:
    """The configuration. Raises: UsageError if this torch lacks what was asked for."""
    import torch
    from torch.distributed.launcher.api import LaunchConfig

    least, most = job["hosts"]
    return LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=job["local_world_size"],
        run_id=job["run_id"],
        role=job["role"],
        rdzv_backend=job["backend"],
        rdzv_endpoint=job["endpoint"],
        rdzv_configs=conf,
        max_restarts=job["max_restarts"],
        monitor_interval=job["monitor_interval"],
        start_method=job["start_method"],
        local_addr=job["local_addr"],
        logs_specs=logs_specs,
        **later_values(job, frozenset(LaunchConfig.__dataclass_fields__), version=torch.__version__),
    )


def later_values(job: dict[str, Any], known: frozenset[str], *, version: str) -> dict[str, Any]:
    """The job's values, where they are not torch's own, of fields that a torch may lack; `known` are this one's.

    Raises: UsageError if a value was asked for that this torch has no field for.
    """
    asked = {
        name: value
        for name in LATER_FIELDS
        if (value := job[name]) is not None and value is not False and value not in ([], TORCHS_OWN.get(name))
    }
    for name, option in LATER_FIELDS.items():
        if option is not None and name in asked and name not in known:
            raise UsageError(
                "this torch's elastic agent does not know an option",
                value=option,
                source=f"torch {version}",
                hint=f"leave {option} away, or install a newer torch",
            )
    return {name: value for name, value in asked.items() if name in known}


def make_logs_specs(logs: dict[str, Any]) -> Any:
    """Where torch writes the ranks' output: its own layout, or the entry point asked for. Raises: UsageError."""
    from torch.distributed.elastic.multiprocessing import Std

    from cpulaunch.launch.hosts.agent.failures import NotedLogs

    made = NotedLogs if logs["specs"] is None else _entry_point(logs["specs"])
    return made(
        log_dir=logs["dir"],
        redirects={rank: Std(number) for rank, number in enumerate(logs["redirects"])},
        tee={rank: Std(number) for rank, number in enumerate(logs["tee"])},
        local_ranks_filter=None if logs["filter"] is None else set(logs["filter"]),
    )


def _entry_point(name: str) -> Any:
    """The class registered under this name. Source: torch 2.13, torch/distributed/run.py, torchrun.logs_specs."""
    from importlib.metadata import entry_points

    found = list(entry_points().select(group="torchrun.logs_specs", name=name))
    if found:
        return found[0].load()
    raise UsageError(
        "no such log specification",
        value=name,
        source="--logs-specs",
        hint="an installed package must register it as an entry point of torchrun.logs_specs",
    )


def check_event_handler(name: str) -> None:
    """Effect: none. Raises: UsageError if torch has no handler of events with this name."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        raise UsageError(
            "no such handler of events", value=name, source="--event-log-handler", hint="torch has null and console"
        ) from None
