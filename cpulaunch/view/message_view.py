"""Errors, warnings and notes as a command with --json prints them on stderr."""

import re
from typing import Any

from cpulaunch.records.errors import CpulaunchError, escaped

LEVELS = ("error", "warning")
OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*")
OPTIONS = re.compile(rf"{OPTION.pattern}(, {OPTION.pattern})*")


def error_json(error: CpulaunchError) -> dict[str, Any]:
    """The error that ends a command as JSON-ready data, schema 1."""
    return _message(
        level="error",
        kind=error.kind,
        message=error.summary,
        what=escaped(error.what),
        value=_text(error.value),
        source=_text(error.source),
        hint=_text(error.hint),
        options=_options(error),
        exit_code=error.exit_code,
    )


def notice_json(text: str) -> dict[str, Any]:
    """What a command says on its way as JSON-ready data, schema 1. Text that begins with "warning: " is one.

    A leading newline, which ends the line of another process, is no part of it.
    """
    line, _, hint = text.removeprefix("\n").partition("\nhint: ")
    level, _, rest = line.partition(": ")
    if level not in LEVELS:
        level, rest = "note", line
    return _message(level=level, message=escaped(rest), what=escaped(rest), hint=_text(hint or None))


def _message(**known: Any) -> dict[str, Any]:
    empty = {"schema": 1, "level": None, "kind": None, "message": None, "what": None, "value": None, "source": None}
    return {**empty, "hint": None, "options": [], "exit_code": None, **known}


def _text(value: object | None) -> str | None:
    return None if value is None else escaped(str(value))


def _options(error: CpulaunchError) -> list[str]:
    """The options that the error is about: those it names, but not those in a value that was typed."""
    value = "" if error.value is None else str(error.value)
    texts = (error.what, error.source or "", value if OPTIONS.fullmatch(value) else "")
    return list(dict.fromkeys(name for text in texts for name in OPTION.findall(text)))
