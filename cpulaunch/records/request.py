"""A launch request: the program, the merged settings with their origins, and the user's environment."""

from __future__ import annotations

from types import MappingProxyType

from cpulaunch.records.record import field, record
from cpulaunch.records.settings import JOB_SETTINGS, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, TypeAlias

ProgramKind: TypeAlias = 'Literal["script", "module", "command"]'
Origin = str
"""`cli`, `environment`, `profile:NAME` or `default`; with ` -O2` behind it for a setting of a level chosen there."""


@record
class Program:
    """What every worker runs: a Python script, a module (-m) or any command (--no-python)."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter: str = ""


@record
class WorkerPython:
    """The Python that runs the workers, and why. `notice`: what is worth a line at every launch; empty if nothing is.

    `origin`: `cli`, `environment`, or `default` for the Python that runs cpulaunch.
    """

    path: str
    origin: Origin
    reason: str
    notice: str = ""


@record
class EnvDefault:
    """An environment variable that a profile sets by default, and the reason."""

    name: str
    value: str
    reason: str


@record
class SchedulerRank:
    """The rank of this process, which a scheduler started as one process per rank.

    `own_cpus`: the process is bound to CPUs that no other rank of the host has.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    own_cpus: bool = False


@record
class Layer:
    """The settings of one source; earlier layers have precedence. `reasons` and `warnings` are about its settings.

    `scheduled_rank`: the rank of this process, if a scheduler started it as one rank. `automatic`: a profile that the
    user did not name.
    """

    origin: Origin
    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)
    env: tuple[EnvDefault, ...] = ()
    scheduled_rank: SchedulerRank | None = None
    warnings: tuple[str, ...] = ()
    automatic: bool = False


@record
class LaunchRequest:
    """Everything that a launch depends on beside the host. `environ` is the environment cpulaunch was started in."""

    program: Program | None
    settings: Settings
    origins: Mapping[str, Origin]
    reasons: Mapping[str, str]
    profile: str | None
    profile_env: tuple[tuple[Origin, EnvDefault], ...]
    environ: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    """Warnings about the request itself, such as a profile for another machine."""
    notices: tuple[str, ...] = ()
    """Values that the command line overrides, one line each."""
    endpoint_interface: str | None = None
    """The network interface on the route to the rendezvous; None for a job on one host, or if it is unknown."""
    endpoint_address: str | None = None
    """The address of that interface, at which the other hosts reach this one."""
    scheduled_rank: SchedulerRank | None = None
    """The rank of this process, if a scheduler started it as one rank; None: cpulaunch starts the ranks."""
    python: WorkerPython | None = None
    """The Python that runs the workers; None for a command, and for another machine's plan."""

    def origin(self, setting: str) -> Origin:
        """The origin of a setting's value."""
        return self.origins.get(setting, "default")

    def is_by_level(self, setting: str) -> bool:
        """Whether a level (--optimize) chose the setting's value. Source: plan/levels.py, with_level."""
        return self.origin(setting) == f"{self.origin('optimize')} -O{self.settings.optimize}"

    @property
    def distributed(self) -> bool:
        """Whether this is a job of ranks: a setting of such jobs was chosen."""
        return any(name in self.origins for name in JOB_SETTINGS)


def setting_source(request: LaunchRequest, name: str) -> str:
    """Where the value of a setting comes from, for an error message."""
    origin = request.origin(name)
    if origin == "environment" and name in request.reasons:
        return request.reasons[name]
    if origin == "environment":
        return f"PET_{name.upper()} in the environment"
    return "command line" if origin == "cli" else origin


def merge(
    layers: Sequence[Layer],
    *,
    program: Program | None,
    profile: str | None,
    environ: Mapping[str, str],
    warnings: tuple[str, ...] = (),
    notices: tuple[str, ...] = (),
) -> LaunchRequest:
    """The request that merges the layers, which are in order of precedence (the command line first).

    Assignments of --env are not merged: they stay in `settings.env`.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    reasons: dict[str, str] = {}
    env: dict[str, tuple[Origin, EnvDefault]] = {}
    for layer in layers:
        for name, value in layer.values.items():
            if name not in values:
                values[name], origins[name] = value, layer.origin
                if name in layer.reasons:
                    reasons[name] = layer.reasons[name]
        for default in layer.env:
            env.setdefault(default.name, (layer.origin, default))
    return LaunchRequest(
        program=program,
        settings=Settings(**values),
        origins=MappingProxyType(origins),
        reasons=MappingProxyType(reasons),
        profile=profile,
        profile_env=tuple(env.values()),
        environ=MappingProxyType(dict(environ)),
        warnings=(*warnings, *(warning for layer in layers for warning in layer.warnings)),
        notices=notices,
        scheduled_rank=next((layer.scheduled_rank for layer in layers if layer.scheduled_rank is not None), None),
    )
