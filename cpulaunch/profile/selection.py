"""The profiles of a launch: the presets that match the host, or those that --profile names.

Presets are in a generated table, so that a launch parses no TOML by default; the user's own profiles are files.
"""

from __future__ import annotations

import os

from cpulaunch.profile.model import Choice, Profile, matches, specificity
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import EnvDefault, Layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


@record
class UserProfiles:
    """The user's own profiles by name, or the error for a file that cannot be read.

    `folder`: the folder that was searched; None if the user has no home directory.
    """

    folder: str | None
    found: tuple[tuple[str, Profile | UsageError], ...] = ()


_presets: list[Profile] = []


def presets() -> tuple[Profile, ...]:
    """The profiles that come with cpulaunch, in order of their names."""
    from cpulaunch.profile.presets import PRESETS

    if not _presets:
        _presets.extend(_preset(row) for row in PRESETS)
    return tuple(_presets)


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
    """cpulaunch's folder in the directory that `variable` names, else under the home; None if there is no home.

    Source: XDG Base Directory Specification (relative paths are ignored).
    """
    base = environ.get(variable, "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, under_home)
    return os.path.join(base, "cpulaunch")


def user_profile_dir(environ: Mapping[str, str]) -> str | None:
    """The folder of the user's own profiles; None if there is no home."""
    folder = user_folder(environ, "XDG_CONFIG_HOME", ".config")
    return folder and os.path.join(folder, "profiles")


def find_profile(name: str, *, config_dir: str | None) -> Profile:
    """The profile with this name, or in this file (a name with "/" or ending in .toml).

    A user's own profile has precedence over a preset of the same name, one of another user has not. Raises: UsageError.
    """
    return _found(name, config_dir)[0]


def _found(name: str, config_dir: str | None) -> tuple[Profile, str | None]:
    """The profile with this name or in this file, and a warning if one of another user was passed over for it.

    Raises: UsageError.
    """
    if os.sep in name or name.endswith(".toml"):
        return _read(name), None
    preset = next((preset for preset in presets() if preset.name == name), None)
    path = None if config_dir is None else os.path.join(config_dir, f"{name}.toml")
    if path is not None and os.path.lexists(path):
        from cpulaunch.profile.file import ForeignProfileError

        try:
            return _read(path, is_named=False), None
        except ForeignProfileError as error:
            if preset is None:
                raise
            return preset, error.summary
    if preset is None:
        raise _unknown(name, config_dir)
    return preset, None


def _read(path: str, *, is_named: bool = True) -> Profile:
    from cpulaunch.profile.file import read_profile

    return read_profile(path, is_named=is_named)


def user_profiles(config_dir: str | None) -> UserProfiles:
    """The profiles in the user's folder."""
    paths = _profile_paths(config_dir)
    return UserProfiles(folder=config_dir, found=tuple((_profile_name(path), _read_or_error(path)) for path in paths))


def _read_or_error(path: str) -> Profile | UsageError:
    try:
        return _read(path, is_named=False)
    except UsageError as error:
        return error


def _profile_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".toml")


def _profile_paths(config_dir: str | None) -> tuple[str, ...]:
    """The user's own profile files, in order of their names."""
    if config_dir is None:
        return ()
    try:
        names = os.listdir(config_dir)
    except OSError:
        return ()
    return tuple(os.path.join(config_dir, name) for name in sorted(names) if name.endswith(".toml"))


def _unknown(name: str, config_dir: str | None) -> UsageError:
    from difflib import get_close_matches

    own = [_profile_name(path) for path in _profile_paths(config_dir)]
    known = {"auto", "none", *(preset.name for preset in presets()), *own} - {name}
    close = [] if name in ("auto", "none") else get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]}?" if close else "cpulaunch profiles list shows all profiles"
    return UsageError("unknown profile", value=repr(name), hint=hint)


def auto_profiles(host: Host) -> tuple[Profile, ...]:
    """The presets that `auto` selects: all situations that apply, then the most specific server preset."""
    situations = [preset for preset in presets() if preset.kind == "situation" and matches(preset, host)]
    servers = [preset for preset in presets() if preset.kind == "server" and matches(preset, host)]
    servers.sort(key=lambda preset: -(specificity(preset, host) or 0))
    return (*situations, *servers[:1])


@record
class ChosenProfiles:
    """The profiles of a launch in order of precedence: those that `--profile` names, then those that `auto` adds.

    `warnings`: about files of other users that were passed over.
    """

    named: tuple[Profile, ...]
    automatic: tuple[Profile, ...]
    warnings: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Profile, ...]:
        """All of them, in order of precedence."""
        return (*self.named, *self.automatic)


def chosen_profiles(names: tuple[str, ...], host: Host, *, config_dir: str | None) -> ChosenProfiles:
    """The profiles that `--profile` selects; no names: it is not given.

    `auto` is added at the end unless a server profile or `none` is named. Raises: UsageError.
    """
    if "none" in names:
        if len(set(names)) > 1:
            raise UsageError(
                "--profile none cannot be combined with other profiles", value=",".join(names), hint="--profile none"
            )
        return ChosenProfiles(named=(), automatic=())
    chosen: dict[str, Profile] = {}
    warnings: list[str] = []
    for name in names:
        if name == "auto":
            found = auto_profiles(host)
        else:
            profile, warning = _found(name, config_dir)
            found = (profile,)
            warnings += [] if warning is None else [warning]
        for profile in found:
            chosen.setdefault(profile.name, profile)
    automatic: tuple[Profile, ...] = ()
    if not any(profile.kind == "server" for profile in chosen.values()):
        automatic = tuple(profile for profile in auto_profiles(host) if profile.name not in chosen)
    return ChosenProfiles(named=tuple(chosen.values()), automatic=automatic, warnings=tuple(warnings))


def chosen_layers(
    names: tuple[str, ...], host: Host, *, config_dir: str | None
) -> tuple[tuple[Layer, ...], str | None]:
    """The layers of the chosen profiles in order of precedence, and their names for the plan (None: no profile).

    Raises: UsageError.
    """
    profiles = chosen_profiles(names, host, config_dir=config_dir)
    layers = (
        *(layer(profile) for profile in profiles.named),
        *(replace(layer(profile), automatic=True) for profile in profiles.automatic),
    )
    return layers, ",".join(profile.name for profile in profiles.all) or None


def profile_warnings(names: tuple[str, ...], host: Host, *, config_dir: str | None) -> tuple[str, ...]:
    """A warning for each chosen profile that is not for this host, was measured elsewhere, or replaces another user's.

    Raises: UsageError.
    """
    chosen = chosen_profiles(names, host, config_dir=config_dir)
    found = (warning for profile in chosen.named if (warning := _warning(profile, host)) is not None)
    return (*chosen.warnings, *found)


def _warning(profile: Profile, host: Host) -> str | None:
    if not matches(profile, host):
        return f"profile {profile.name} is for another machine: {profile.summary}"
    if not profile.provenance:
        return None
    from cpulaunch.profile.provenance import provenance_warning

    return provenance_warning(profile, host)


def layer(profile: Profile) -> Layer:
    """The settings of a profile, as a layer of a request."""
    return Layer(
        origin=f"profile:{profile.name}",
        values={choice.name: choice.value for choice in profile.settings},
        reasons={choice.name: choice.reason for choice in profile.settings},
        env=tuple(EnvDefault(name=each.name, value=each.value, reason=each.reason) for each in profile.env),
    )
