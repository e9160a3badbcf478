"""What was asked: the program, the merged settings with their origins, and the user's environment."""

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
"""`cli`, `environment`, `profile:NAME` or `default`."""


@record
class Program:
    """What every worker runs: a Python script, a module (-m) or any command (--no-python)."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter: str = ""


@record
class EnvDefault:
    """An environment variable a profile wants, in its own words."""

    name: str
    value: str
    reason: str


@record
class SchedulerRank:
    """This process as one rank that a scheduler started, among all and among those of its host.

    `own_cpus`: it is bound to CPUs that no other rank of the host has.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    own_cpus: bool = False


@record
class Layer:
    """Values one source wants; earlier layers win. `reasons` explain its settings, `warnings` what is odd about them.

    `scheduled_rank`: a scheduler started this process as one rank.
    """

    origin: Origin
    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)
    env: tuple[EnvDefault, ...] = ()
    scheduled_rank: SchedulerRank | None = None
    warnings: tuple[str, ...] = ()


@record
class LaunchRequest:
    """One launch, fully asked for. `environ` is the environment cpulaunch was started in."""

    program: Program | None
    settings: Settings
    origins: Mapping[str, Origin]
    reasons: Mapping[str, str]
    profile: str | None
    profile_env: tuple[tuple[Origin, EnvDefault], ...]
    environ: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    """What is odd about the request itself, such as a profile made for another machine."""
    notices: tuple[str, ...] = ()
    """What was asked for twice and is settled, in one line each."""
    endpoint_interface: str | None = None
    """The network interface on the way to where the hosts of the job meet; None: one host, or it cannot be told."""
    endpoint_address: str | None = None
    """This host's address on that way, at which the others reach it."""
    scheduled_rank: SchedulerRank | None = None
    """This process as one rank of the job; None: cpulaunch starts the ranks."""

    def origin(self, setting: str) -> Origin:
        """Who chose a setting's value; "default" if nobody did."""
        return self.origins.get(setting, "default")

    @property
    def distributed(self) -> bool:
        """Whether this is a job of ranks: somebody chose a setting that only such a job has."""
        return any(name in self.origins for name in JOB_SETTINGS)


def setting_source(request: LaunchRequest, name: str) -> str:
    """Where a setting's value came from, for an error message."""
    origin = request.origin(name)
    if origin == "environment" and name in request.reasons:
        return request.reasons[name]
    if origin == "environment":
        return f"PET_{name.upper()} in your environment"
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
    """The request made of layers in order of precedence (the command line first).

    `env` assignments come from the command line only and stay in `settings.env`.
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
