"""A profile file, read and checked: an error names the file, the line and the key."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.profile.model import Choice, Conditions, Profile
from cpulaunch.profile.schema import APPLIES, CHOICE, CONFLICTS, TOP, check_variable, text
from cpulaunch.profile.toml_lines import key_lines, line_of
from cpulaunch.records.errors import UsageError
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.value_types import ValueType

MAX_BYTES = 64 * 1024
"""The presets have at most 4 KiB; anything this long is no profile."""
MAX_LINE = 2_000
"""Characters; a key of 30,000 dotted parts, legal TOML, takes the standard library a minute."""

HINT = "cpulaunch profiles validate FILE; docs/profiles.md has every key"
Path = tuple[str | int, ...]


def read_profile(path: str) -> Profile:
    """The profile in a file. Raises: UsageError naming file, line and key."""
    name = os.path.basename(path).removesuffix(".toml")
    return parse_profile(_read_text(path), name=name, path=path)


def _read_text(path: str) -> str:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _unreadable(path, "not a regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or "cannot be opened") from None
    if len(content) > MAX_BYTES:
        raise _unreadable(path, f"larger than {MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error("profile is not UTF-8 text", value=f"byte {error.start}", place=f"{path}, line {line}") from None


def _open_at_once(path: str, flags: int) -> int:
    """A descriptor without waiting: a FIFO that nobody writes to would block."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _unreadable(path: str, why: str) -> UsageError:
    return UsageError("cannot read profile", value=f"{path}: {why}", hint="name a profile file")


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
        if conflict.holds(chosen, profile):
            raise document.error("profile contradicts itself", conflict.path, hint=conflict.why)
    return profile


def _parsed(source: str, place: str) -> dict[str, Any]:
    import tomllib

    for number, line in enumerate(source.split("\n"), 1):
        if len(line) > MAX_LINE:
            raise _error("line too long in profile", value=f"{len(line)} characters", place=f"{place}, line {number}")
    try:
        return tomllib.loads(source)
    except RecursionError:
        raise _error("profile is not TOML", value="nested too deeply", place=place) from None
    except ValueError as error:
        raise _not_toml(str(error), source, place) from None


def _not_toml(message: str, source: str, place: str) -> UsageError:
    """The parser's words, which end in "(at line 3, column 5)" or "(at end of document)"."""
    what, _, position = message.partition(" (at ")
    at = re.match(r"line (\d+)", position)
    line = at.group(1) if at else source.rstrip("\n").count("\n") + 1
    return _error("profile is not TOML", value=what, place=f"{place}, line {line}" if position else place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A parsed file and what its errors need."""

    values: dict[str, Any]
    lines: Mapping[Path, int]
    place: str
    name: str
    path: str | None

    def error(self, what: str, path: Path, *, hint: str, value: object = None) -> UsageError:
        """An error about one key, with the value seen unless another is given."""
        line = line_of(path, self.lines)
        key = ".".join(str(part) for part in path)
        place = f"{self.place}, line {line}, {key}" if line else f"{self.place}, {key}"
        seen = self._at(path) if value is None else value
        return _error(what, value=_short(seen), place=place, hint=hint)

    def _at(self, path: Path) -> object:
        value: Any = self.values
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return "missing"
        return value


def _short(value: object) -> str:
    shown = value if isinstance(value, str) else repr(value)
    shown = "".join(character if character.isprintable() else "?" for character in shown)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _profile(document: _Document) -> Profile:
    _refuse_unknown(document, (), document.values, [*TOP, "applies", "settings", "env"])
    top = _fields(document, (), document.values, TOP)
    for required in ("summary", "kind"):
        if required not in top:
            raise document.error("profile lacks a key", (required,), hint=f"add {required} = … at the top")
    applies = _applies(document)
    if not applies and top["kind"] != "intent":
        raise document.error("profile lacks a key", ("applies",), hint='add [applies], or kind = "intent"')
    return Profile(
        name=document.name,
        kind=top["kind"],
        summary=top["summary"],
        not_for=top.get("not_for"),
        applies=applies,
        settings=tuple(_setting(document, name) for name in _table(document, ("settings",))),
        env=tuple(_variable(document, name) for name in _table(document, ("env",))),
        path=document.path,
    )


def _refuse_unknown(document: _Document, path: Path, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise document.error("unknown key in profile", (*path, key), value=key, hint=_nearest(key, known))


def _nearest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "known are " + ", ".join(known)


def _table(document: _Document, path: Path) -> Mapping[str, Any]:
    value: Any = document.values
    for part in path:
        value = value.get(part, {})
    if not isinstance(value, dict):
        raise document.error("expected a table in profile", path, hint="write it as [" + ".".join(map(str, path)) + "]")
    return value


def _fields(
    document: _Document, path: Path, table: Mapping[str, Any], checks: Mapping[str, Callable[[object], Any]]
) -> dict[str, Any]:
    return {key: _checked(document, (*path, key), check, table[key]) for key, check in checks.items() if key in table}


def _checked(document: _Document, path: Path, check: Callable[[Any], Any], value: object) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise document.error("wrong value in profile", path, hint=str(error)) from None


def _applies(document: _Document) -> tuple[Conditions, ...]:
    value = document.values.get("applies", [])
    tables = value if isinstance(value, list) else [value]
    return tuple(
        _conditions(document, ("applies", position) if isinstance(value, list) else ("applies",), table)
        for position, table in enumerate(tables)
    )


def _conditions(document: _Document, path: Path, table: object) -> Conditions:
    if not isinstance(table, dict) or not table:
        raise document.error("expected conditions in profile", path, hint='such as [applies] and arch = "x86_64"')
    _refuse_unknown(document, path, table, APPLIES)
    return tuple(_fields(document, path, table, APPLIES).items())


def _setting(document: _Document, name: str) -> Choice:
    known = {spec.name: spec.value_type for spec in setting_specs().values() if spec.in_profile}
    if name not in known:
        outside = name in setting_specs()
        hint = f"give {setting_specs()[name].flag} on the command line" if outside else _nearest(name, list(known))
        what = "setting cannot be in a profile" if outside else "unknown setting in profile"
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
        raise document.error("variable cannot be set by a profile", path, value=name, hint=str(error)) from None
    return _choice(document, path, text, example='value = "…"')


def _choice(document: _Document, path: Path, check: Callable[[Any], Any], *, example: str) -> Choice:
    table = _table(document, path)
    _refuse_unknown(document, path, table, ["value", *CHOICE])
    for required, hint in (("value", example), ("reason", 'reason = "…", one line that the plan prints')):
        if required not in table:
            raise document.error("profile lacks a key", (*path, required), hint=f"add {hint}")
    value = _checked(document, (*path, "value"), check, table["value"])
    return Choice(name=str(path[-1]), value=value, **_fields(document, path, table, CHOICE))
