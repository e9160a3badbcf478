"""Profiles as `profiles list`, `show` and `validate` print them: as text for a person and as JSON."""

from collections.abc import Iterable
from typing import Any

from cpulaunch.profile.model import Choice, Conditions, Profile
from cpulaunch.profile.selection import UserProfiles, auto_profiles, presets
from cpulaunch.records.errors import UsageError, escaped
from cpulaunch.records.host import Host, count_text
from cpulaunch.view.message_view import error_json
from cpulaunch.view.text import wrapped

TITLES = {"situation": "Situations", "server": "Servers", "intent": "Intents"}
NAME_WIDTH = 18
FOOTNOTE = "* used here by default. `cpulaunch profiles show NAME` explains a profile."


def list_json(host: Host, *, own: UserProfiles) -> dict[str, Any]:
    """Every profile and whether `auto` picks it for this host."""
    picked = {profile.name for profile in auto_profiles(host)}
    shipped = [_entry(each.name, each, auto=each.name in picked) for each in presets()]
    return {"schema": 1, "profiles": [*shipped, *(_entry(name, found, auto=False) for name, found in own.found)]}


def _entry(name: str, found: Profile | UsageError, *, auto: bool) -> dict[str, Any]:
    if isinstance(found, UsageError):
        return {"name": name, "kind": None, "summary": None, "auto": False, "path": None, "error": str(found)}
    return {"name": name, "kind": found.kind, "summary": found.summary, "auto": auto, "path": found.path}


def list_text(host: Host, *, own: UserProfiles, width: int) -> str:
    """Every profile in groups, those `auto` picks for this host marked."""
    picked = {profile.name for profile in auto_profiles(host)}
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += [title]
        for preset in presets():
            if preset.kind == kind:
                lines += _row(preset.name, preset.summary, marked=preset.name in picked, width=width)
        lines += [""]
    if own.found:
        lines += [f"Your profiles ({own.folder})"]
        for name, found in own.found:
            summary = f"error: {found.summary}" if isinstance(found, UsageError) else found.summary
            lines += _row(name, summary, marked=False, width=width)
        lines += [""]
    return "\n".join([*lines, FOOTNOTE])


def _row(name: str, summary: str, *, marked: bool, width: int) -> list[str]:
    head = f"{'*' if marked else ' '} {name}"
    return wrapped(summary, width, head=f"{head:<{NAME_WIDTH + 2}} ")


def show_json(profile: Profile) -> dict[str, Any]:
    """One profile with everything it says."""
    return {
        "schema": 1,
        "name": profile.name,
        "kind": profile.kind,
        "summary": profile.summary,
        "not_for": profile.not_for,
        "path": profile.path,
        "applies": [{key: _plain(key, value) for key, value in conditions} for conditions in profile.applies],
        "settings": [_choice_json(choice) for choice in profile.settings],
        "env": [_choice_json(choice) for choice in profile.env],
        **({"provenance": dict(profile.provenance)} if profile.provenance else {}),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "value": choice.value,
        "reason": choice.reason,
        "source": choice.source,
        "date": choice.date,
    }


def _plain(key: str, value: Any) -> Any:
    """A condition's value as written: an integer for a range of one."""
    if key in ("family", "models"):
        return [low if low == high else [low, high] for low, high in value]
    return list(value) if isinstance(value, tuple) else value


def show_text(profile: Profile, *, width: int) -> str:
    """One profile for a person: when it applies, when not, every value with reason, source and date."""
    lines = wrapped(profile.summary, width, head=f"{profile.name}: ")
    lines += wrapped(profile.kind, width, head="  kind       ")
    for number, conditions in enumerate(profile.applies):
        head = "  applies    " if number == 0 else "  or         "
        lines += wrapped(_conditions_text(conditions), width, head=head)
    if profile.not_for is not None:
        lines += wrapped(profile.not_for, width, head="  not for    ")
    if profile.path is not None:
        lines += [escaped(f"  file       {profile.path}")]
    for name, value in profile.provenance:
        lines += wrapped(value, width, head=f"  {name.replace('_', ' '):<10} ")
    for choice in profile.settings:
        lines += ["", *_choice_lines(f"--{choice.name.replace('_', '-')}", choice, width)]
    for choice in profile.env:
        lines += ["", *_choice_lines(f"{choice.name}=", choice, width)]
    return "\n".join(lines)


def _conditions_text(conditions: Conditions) -> str:
    return "; ".join(f"{key.replace('_', ' ')} {_value_text(key, value)}" for key, value in conditions)


def _value_text(key: str, value: Any) -> str:
    if key in ("family", "models"):
        return ", ".join(f"{low:#x}" if low == high else f"{low:#x}-{high:#x}" for low, high in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value)


def _choice_lines(head: str, choice: Choice, width: int) -> Iterable[str]:
    if isinstance(choice.value, bool):
        title = head if choice.value else head.replace("--", "--no-", 1)
    else:
        title = f"{head}{choice.value}" if head.endswith("=") else f"{head} {choice.value}"
    yield from wrapped(title, width, head="  ")
    yield from wrapped(choice.reason, width, head="      ")
    if choice.source is not None:
        dated = f"{choice.source} ({choice.date})" if choice.date else choice.source
        yield from wrapped(dated, width, head="      source: ")


def validate_json(file: str, found: Profile | tuple[UsageError, ...]) -> dict[str, Any]:
    """Whether the file is a valid profile, and if not, everything that is wrong with it."""
    errors, profile = (found, None) if isinstance(found, tuple) else ((), found)
    return {
        "schema": 1,
        "file": file,
        "valid": profile is not None,
        "kind": profile and profile.kind,
        "settings": profile and len(profile.settings),
        "variables": profile and len(profile.env),
        "errors": [error_json(error) for error in errors],
    }


def validate_text(file: str, profile: Profile) -> str:
    """One line saying that the profile read from this file is valid."""
    counts = f"{count_text(len(profile.settings), 'setting')}, {count_text(len(profile.env), 'variable')}"
    return escaped(f"{file}: OK ({profile.kind}, {counts})")
