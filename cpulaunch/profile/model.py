"""Profiles, and whether one applies to a host."""

from __future__ import annotations

from cpulaunch.records.host import Host
from cpulaunch.records.record import record
from cpulaunch.records.value_types import literal_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal, TypeAlias

ProfileKind: TypeAlias = 'Literal["server", "situation", "intent"]'
PROFILE_KINDS = literal_words(ProfileKind)
Conditions: TypeAlias = "tuple[tuple[str, Any], ...]"
"""Names of CONDITIONS with required values, all of which must hold."""


@record
class Choice:
    """The value of one setting or environment variable in a profile, with its reason and source."""

    name: str
    value: Any
    reason: str
    source: str | None = None
    date: str | None = None


@record
class Profile:
    """One profile. `applies` lists alternatives; empty: it applies to every host. `path` is None for a preset.

    `provenance`: how it was measured, if it was, as names and texts.
    """

    name: str
    kind: ProfileKind
    summary: str
    not_for: str | None = None
    applies: tuple[Conditions, ...] = ()
    settings: tuple[Choice, ...] = ()
    env: tuple[Choice, ...] = ()
    path: str | None = None
    provenance: tuple[tuple[str, str], ...] = ()


def _is_hybrid(host: Host) -> bool:
    kinds = {cpu.kind for cpu in host.cpus}
    return {"performance", "efficiency"} <= kinds


def _in_ranges(number: int | None, ranges: tuple[tuple[int, int], ...]) -> bool:
    return number is not None and any(low <= number <= high for low, high in ranges)


# An unknown fact matches no condition, not even "…_absent": a guess is worse than the defaults.
CONDITIONS: Mapping[str, Callable[[Host, Any], bool]] = {
    "arch": lambda host, wanted: host.arch in wanted,
    "vendor": lambda host, wanted: host.cpu.vendor in wanted,
    "family": lambda host, wanted: _in_ranges(host.cpu.family, wanted),
    "models": lambda host, wanted: _in_ranges(host.cpu.model, wanted),
    "features": lambda host, wanted: host.cpu.isa.issuperset(wanted),
    "features_absent": lambda host, wanted: bool(host.cpu.isa) and host.cpu.isa.isdisjoint(wanted),
    "platforms": lambda host, wanted: host.cpu.platform in wanted,
    "platforms_absent": lambda host, wanted: host.cpu.platform is not None and host.cpu.platform not in wanted,
    "hybrid": lambda host, wanted: _is_hybrid(host) is wanted,
    "quota": lambda host, wanted: (host.limits.quota is not None) is wanted,
    "container": lambda host, wanted: host.container is wanted,
    "gpus": lambda host, wanted: bool(host.gpus) is wanted,
}


def _holds(conditions: Conditions, host: Host) -> bool:
    return all(CONDITIONS[name](host, wanted) for name, wanted in conditions)


def matches(profile: Profile, host: Host) -> bool:
    """Whether a profile applies to this host."""
    return not profile.applies or any(_holds(conditions, host) for conditions in profile.applies)


def specificity(profile: Profile, host: Host) -> int | None:
    """The number of conditions of the longest alternative that holds on this host; None if no alternative does."""
    if not matches(profile, host):
        return None
    return max((len(conditions) for conditions in profile.applies if _holds(conditions, host)), default=0)
