"""Which profiles a launch uses: the presets that match the host, or those named.

Presets come from a generated table (no TOML is parsed for a launch that names none); a user's own profiles are files.
"""

from __future__ import annotations

import os

from cpulaunch.profile.model import Choice, Profile, matches, specificity
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.record import record
from cpulaunch.records.request import EnvDefault, Layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


@record
class UserProfiles:
    """The user's own profiles by name, each with the error instead where its file cannot be read.

    `folder`: where they were looked for; None if the user has no home directory.
    """

    folder: str | None
    found: tuple[tuple[str, Profile | UsageError], ...] = ()


_made: list[Profile] = []


def presets() -> tuple[Profile, ...]:
    """The profiles that come with cpulaunch, by name; made when first asked for."""
    from cpulaunch.profile.presets import PRESETS

    if not _made:
        _made.extend(_preset(row) for row in PRESETS)
    return tuple(_made)


def _preset(row: tuple[Any, ...]) -> Profile:
    name, kind, summary, not_for, applies, settings, env = row
    return Profile(
        name=name,
        kind=kind,
        summary=summary,
        not_for=not_for,
        applies=applies,
        settings=_choices(settings),
        env=_choices(env),
    )


def _choices(rows: Iterable[tuple[str, Any, str, str, str]]) -> tuple[Choice, ...]:
    return tuple(
        Choice(name=name, value=value, reason=reason, source=source, date=date)
        for name, value, reason, source, date in rows
    )


def user_folder(environ: Mapping[str, str], variable: str, under_home: str) -> str | None:
    """cpulaunch's own folder among a user's, in `variable` or else under the home; None where there is no home.

    Source: XDG Base Directory Specification (relative values are to be ignored).
    """
    base = environ.get(variable, "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, under_home)
    return os.path.join(base, "cpulaunch")


def user_profile_dir(environ: Mapping[str, str]) -> str | None:
    """The folder of the user's own profiles; None where there is no home."""
    folder = user_folder(environ, "XDG_CONFIG_HOME", ".config")
    return folder and os.path.join(folder, "profiles")


def find_profile(name: str, *, config_dir: str | None) -> Profile:
    """The profile of this name, or in this file (a name with "/" or ending in .toml).

    A user's own profile goes before a preset of the same name. Raises: UsageError.
    """
    if os.sep in name or name.endswith(".toml"):
        return _read(name)
    if config_dir is not None:
        path = os.path.join(config_dir, f"{name}.toml")
        if os.path.lexists(path):
            return _read(path)
    for preset in presets():
        if preset.name == name:
            return preset
    raise _unknown(name, config_dir)


def _read(path: str) -> Profile:
    from cpulaunch.profile.file import read_profile

    return read_profile(path)


def user_profiles(config_dir: str | None) -> UserProfiles:
    """All profiles in the user's folder."""
    paths = _profile_paths(config_dir)
    return UserProfiles(folder=config_dir, found=tuple((_profile_name(path), _read_or_error(path)) for path in paths))


def _read_or_error(path: str) -> Profile | UsageError:
    try:
        return _read(path)
    except UsageError as error:
        return error


def _profile_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".toml")


def _profile_paths(config_dir: str | None) -> tuple[str, ...]:
    """The user's own profile files, by name."""
    if config_dir is None:
        return ()
    try:
        names = os.listdir(config_dir)
    except OSError:
        return ()
    return tuple(os.path.join(config_dir, name) for name in sorted(names) if name.endswith(".toml"))


def _unknown(name: str, config_dir: str | None) -> UsageError:
    from difflib import get_close_matches

    own = [os.path.basename(path).removesuffix(".toml") for path in _profile_paths(config_dir)]
    known = {"auto", "none", *(preset.name for preset in presets()), *own} - {name}
    close = [] if name in ("auto", "none") else get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]}?" if close else "cpulaunch profiles list"
    return UsageError("no such profile", value=repr(name), hint=hint)


def auto_profiles(host: Host) -> tuple[Profile, ...]:
    """What `auto` picks: every situation that holds, then the most specific server preset that matches."""
    situations = [preset for preset in presets() if preset.kind == "situation" and matches(preset, host)]
    servers = [preset for preset in presets() if preset.kind == "server"]
    best = max(servers, key=lambda preset: specificity(preset, host), default=None)
    if best is not None and specificity(best, host) >= 0:
        situations.append(best)
    return tuple(situations)


def chosen_profiles(names: tuple[str, ...], host: Host, *, config_dir: str | None) -> tuple[Profile, ...]:
    """The profiles meant by `--profile`, the strongest first.

    `auto` is added last, unless a server's profile or `none` is named. Raises: UsageError.
    """
    if "none" in names:
        if len(set(names)) > 1:
            raise UsageError(
                "profile none goes with no other",
                value=",".join(names),
                source="--profile",
                hint="--profile none",
            )
        return ()
    chosen: dict[str, Profile] = {}
    for name in names:
        found = auto_profiles(host) if name == "auto" else (find_profile(name, config_dir=config_dir),)
        for profile in found:
            chosen.setdefault(profile.name, profile)
    if not any(profile.kind == "server" for profile in chosen.values()):
        for profile in auto_profiles(host):
            chosen.setdefault(profile.name, profile)
    return tuple(chosen.values())


def chosen_layers(
    names: tuple[str, ...], host: Host, *, config_dir: str | None
) -> tuple[tuple[Layer, ...], str | None]:
    """The layers of the chosen profiles, the strongest first, and their names for the plan (None: no profile).

    Raises: UsageError.
    """
    profiles = chosen_profiles(names, host, config_dir=config_dir)
    return tuple(layer(profile) for profile in profiles), ",".join(profile.name for profile in profiles) or None


def profile_warnings(names: tuple[str, ...], host: Host, *, config_dir: str | None) -> tuple[str, ...]:
    """One line for each named profile that is not made for this host. Raises: UsageError."""
    return tuple(
        f"profile {profile.name} is not made for this machine ({profile.summary})"
        for profile in chosen_profiles(names, host, config_dir=config_dir)
        if not matches(profile, host)
    )


def layer(profile: Profile) -> Layer:
    """A profile as one layer of a request."""
    return Layer(
        origin=f"profile:{profile.name}",
        values={choice.name: choice.value for choice in profile.settings},
        reasons={choice.name: choice.reason for choice in profile.settings},
        env=tuple(EnvDefault(name=each.name, value=each.value, reason=each.reason) for each in profile.env),
    )
