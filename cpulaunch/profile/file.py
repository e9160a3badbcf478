"""Profile files: reading and checking. Every error names the file, the line and the key."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

from cpulaunch.profile.model import Choice, Conditions, Profile
from cpulaunch.profile.schema import APPLIES, CHOICE, CONFLICTS, PROVENANCE, TOP, check_variable, variable_value
from cpulaunch.profile.toml_lines import key_lines, line_of, long_line
from cpulaunch.records.errors import UsageError
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.value_types import ValueType
from cpulaunch.system.files.caches import others_write
from cpulaunch.system.files.owners import is_trusted_in
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.reading import open_regular

MAX_BYTES = 64 * 1024
"""Limit on the size of a file; the presets have at most 4 KiB."""

HINT = "docs/profiles.md lists every key"
Path = tuple[str | int, ...]
MISSING = object()
TABLES = [*TOP, "applies", "settings", "env", "provenance"]


class ForeignProfileError(UsageError):
    """Another user could have written a profile that is not named by its path: it is passed over."""


def read_profile(path: str, *, is_named: bool = True) -> Profile:
    """The profile in a file. `is_named`: the user gave its path, and so chose it, of any owner.

    Raises: UsageError naming file, line and key.
    """
    name = os.path.basename(path).removesuffix(".toml")
    return parse_profile(_read_text(path, is_named=is_named), name=name, path=path)


def _read_text(path: str, *, is_named: bool = True) -> str:
    if not is_named and (owner := _foreign_owner(path)):
        raise _foreign(path, owner)
    try:
        with open(open_regular(path, links=True), "rb") as file:
            if not is_named and (reason := others_write(file.fileno())) is not None:
                raise _foreign(path, reason)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or "cannot be opened") from None
    if len(content) > MAX_BYTES:
        raise _unreadable(path, f"larger than {MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error(
            "the profile is not UTF-8 text", value=f"byte {error.start}", place=f"{path}, line {line}"
        ) from None


def _foreign_owner(path: str) -> str:
    """Which other user owns what has this path, or a link on the way, which may lead anywhere; empty if none does."""
    try:
        folder = open_folder(os.path.dirname(path) or ".")
    except OSError as error:
        return (error.strerror or "") if error.errno == errno.EPERM else ""
    try:
        status = os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False)
        return "" if is_trusted_in(status, folder) else f"it belongs to user {status.st_uid}"
    except OSError:
        return ""
    finally:
        os.close(folder)


def _foreign(path: str, why: str) -> UsageError:
    what = "the profile is not used, as another user may have written it"
    return ForeignProfileError(what, value=f"{path}: {why}", hint="name its path to use it")


def _unreadable(path: str, why: str) -> UsageError:
    return UsageError("cannot read the profile", value=f"{path}: {why}", hint="give a .toml file")


def _error(what: str, *, value: object, place: str, hint: str = HINT) -> UsageError:
    return UsageError(what, value=value, source=place, hint=hint)


def parse_profile(source: str, *, name: str, path: str | None = None) -> Profile:
    """The profile a TOML text describes. Raises: UsageError naming file, line and key."""
    document = _Document(
        values=_parsed(source, path or name), lines=key_lines(source), place=path or name, name=name, path=path
    )
    profile = _profile(document)
    chosen = {choice.name: choice.value for choice in profile.settings}
    for conflict in CONFLICTS:
        if conflict.applies(chosen, profile):
            raise document.error("conflicting settings in the profile", conflict.path, hint=conflict.reason)
    return profile


def _parsed(source: str, place: str) -> dict[str, Any]:
    import tomllib

    if (found := long_line(source)) is not None:
        raise _error("line too long in the profile", value=f"{found[1]} characters", place=f"{place}, line {found[0]}")
    try:
        return tomllib.loads(source)
    except RecursionError:
        raise _error("invalid TOML", value="nested too deeply", place=place) from None
    except ValueError as error:
        raise _not_toml(str(error), source, place) from None


def _not_toml(message: str, source: str, place: str) -> UsageError:
    """The error for a parser's message, which ends in "(at line 3, column 5)" or "(at end of document)"."""
    what, _, position = message.partition(" (at ")
    at = re.match(r"line (\d+)", position)
    line = at.group(1) if at else source.rstrip("\n").count("\n") + 1
    return _error("invalid TOML", value=what, place=f"{place}, line {line}" if position else place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A parsed file, with the lines and names that its errors quote."""

    values: dict[str, Any]
    lines: Mapping[Path, int]
    place: str
    name: str
    path: str | None

    def error(self, what: str, path: Path, *, hint: str, value: object = None) -> UsageError:
        """An error about one key; `value` defaults to the value of the key."""
        line = line_of(path, self.lines)
        key = ".".join(str(part) for part in path)
        place = f"{self.place}, line {line}, {key}" if line else f"{self.place}, {key}"
        found = self._at(path)
        shown = None if found is MISSING else _short(_toml(found))
        return _error(what, value=shown if value is None else _short(str(value)), place=place, hint=hint)

    def missing(self, path: Path, *, hint: str) -> UsageError:
        """An error about a key that the file lacks."""
        table = ".".join(map(str, path[:-1])) or "the profile"
        return self.error(f"{table} lacks key {path[-1]!r}", path, hint=hint)

    def _at(self, path: Path) -> object:
        value: Any = self.values
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return MISSING
        return value


def profile_errors(path: str) -> tuple[UsageError, ...]:
    """The errors of a profile file: one for each table that has any; none if the profile is valid."""
    try:
        read_profile(path)
    except UsageError as error:
        first = error
    else:
        return ()
    try:
        source = _read_text(path)
        document = _Document(
            values=_parsed(source, path), lines=key_lines(source), place=path, name=os.path.basename(path), path=path
        )
    except UsageError:
        return (first,)
    errors = {str(error): error for error in (first, *_errors(document))}
    return tuple(errors.values())


def _errors(document: _Document) -> Iterator[UsageError]:
    checks: list[Callable[[], object]] = [
        lambda: _refuse_unknown(document, (), document.values, TABLES),
        lambda: _fields(document, (), document.values, TOP),
        lambda: _applies(document),
        lambda: _provenance(document),
    ]
    for table, check in (("settings", _setting), ("env", _variable)):
        names = document.values.get(table, {})
        checks += [partial(check, document, name) for name in names if isinstance(names, dict)]
    for each in checks:
        try:
            each()
        except UsageError as error:
            yield error


def _short(text: str) -> str:
    """The text in at most 60 printable characters."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _profile(document: _Document) -> Profile:
    _refuse_unknown(document, (), document.values, TABLES)
    top = _fields(document, (), document.values, TOP)
    for required in ("summary", "kind"):
        if required not in top:
            raise document.missing((required,), hint=f'add {required} = "…" at the top')
    applies = _applies(document)
    if not applies and top["kind"] != "intent":
        raise document.missing(("applies",), hint='add [applies], or kind = "intent"')
    return Profile(
        name=document.name,
        kind=top["kind"],
        summary=top["summary"],
        not_for=top.get("not_for"),
        applies=applies,
        settings=tuple(_setting(document, name) for name in _table(document, ("settings",))),
        env=tuple(_variable(document, name) for name in _table(document, ("env",))),
        path=document.path,
        provenance=_provenance(document),
    )


def _provenance(document: _Document) -> tuple[tuple[str, str], ...]:
    table = _table(document, ("provenance",))
    _refuse_unknown(document, ("provenance",), table, PROVENANCE)
    return tuple(_fields(document, ("provenance",), table, PROVENANCE).items())


def _refuse_unknown(document: _Document, path: Path, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise document.error("unknown key in the profile", (*path, key), value=key, hint=_nearest(key, known))


def _nearest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "valid: " + ", ".join(known)


def _table(document: _Document, path: Path) -> Mapping[str, Any]:
    value: Any = document.values
    for part in path:
        value = value.get(part, {})
    if not isinstance(value, dict):
        raise document.error("expected a table", path, hint="write it as [" + ".".join(map(str, path)) + "]")
    return value


def _fields(
    document: _Document, path: Path, table: Mapping[str, Any], checks: Mapping[str, Callable[[object], Any]]
) -> dict[str, Any]:
    return {key: _checked(document, (*path, key), check, table[key]) for key, check in checks.items() if key in table}


def _checked(document: _Document, path: Path, check: Callable[[Any], Any], value: object) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise document.error("invalid value", path, hint=str(error)) from None


def _applies(document: _Document) -> tuple[Conditions, ...]:
    value = document.values.get("applies", [])
    tables = value if isinstance(value, list) else [value]
    return tuple(
        _conditions(document, ("applies", position) if isinstance(value, list) else ("applies",), table)
        for position, table in enumerate(tables)
    )


def _conditions(document: _Document, path: Path, table: object) -> Conditions:
    if not isinstance(table, dict) or not table:
        raise document.error("expected conditions", path, hint='for example [applies] with arch = "x86_64"')
    _refuse_unknown(document, path, table, APPLIES)
    return tuple(_fields(document, path, table, APPLIES).items())


def _setting(document: _Document, name: str) -> Choice:
    known = {spec.name: spec.value_type for spec in setting_specs().values() if spec.in_profile}
    if name not in known:
        spec = setting_specs().get(name)
        hint = _nearest(name, list(known)) if spec is None else f"use {spec.flag} on the command line"
        what = "unknown setting" if spec is None else "a profile cannot contain this setting"
        raise document.error(what, ("settings", name), value=name, hint=hint)
    return _choice(document, ("settings", name), known[name].from_toml, example=_example(known[name]))


def _example(value_type: ValueType) -> str:
    return (
        f'value = "{value_type.choices[0]}"'
        if value_type.choices
        else "value = true"
        if value_type.flag
        else "value = …"
    )


def _variable(document: _Document, name: str) -> Choice:
    path = ("env", name)
    try:
        check_variable(name)
    except ValueError as error:
        raise document.error("a profile cannot set this variable", path, value=name, hint=str(error)) from None
    return _choice(document, path, variable_value(name), example='value = "…"')


def _choice(document: _Document, path: Path, check: Callable[[Any], Any], *, example: str) -> Choice:
    table = _table(document, path)
    _refuse_unknown(document, path, table, ["value", *CHOICE])
    for required, hint in (("value", example), ("reason", 'reason = "…": the plan prints it, in one line')):
        if required not in table:
            raise document.missing((*path, required), hint=f"add {hint}")
    value = _checked(document, (*path, "value"), check, table["value"])
    return Choice(name=str(path[-1]), value=value, **_fields(document, path, table, CHOICE))
