"""`[tool.cpulaunch.check]` of a pyproject.toml: which rules count and which files are left out."""

import re
import tomllib
from pathlib import PurePath

from cpulaunch.profile.toml_lines import long_line
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

KEYS = ("select", "ignore", "exclude")
MAX_BYTES = 128 << 10
"""Limit on the size of a file: for long dotted keys, the standard library takes 2,000 times as much memory."""
TABLE = re.compile(
    rb"""tool["']?[ \t]*\.[ \t]*["']?cpulaunch\b|^[ \t]*(\[[ \t]*)?["']?tool["']?[ \t]*[]=]""", re.MULTILINE
)
"""What is in every file that has the table; the name of the package is also in lists of dependencies."""


@record
class CheckConfiguration:
    """`select`: rules, empty for all; `ignore`: rules that do not count; `exclude`: patterns of paths."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def configuration(path: str, data: bytes) -> CheckConfiguration:
    """The table of a file; all defaults if it has none. Raises: UsageError."""
    refusal = _refusal(path, data)
    if refusal is not None:
        if TABLE.search(data):
            raise refusal
        return CheckConfiguration()
    try:
        table = tomllib.loads(data.decode()).get("tool", {}).get("cpulaunch", {}).get("check", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError("cannot read the configuration", value=str(error), source=path) from None
    if not isinstance(table, dict):
        raise UsageError("[tool.cpulaunch.check] is no table", source=path)
    for key, value in table.items():
        if key not in KEYS:
            raise UsageError("unknown key of [tool.cpulaunch.check]", value=key, source=path, hint=", ".join(KEYS))
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{key} is a list of words", value=str(value), source=path, hint=f'{key} = ["..."]')
    if any(not PurePath(pattern).name for pattern in table.get("exclude", ())):
        raise UsageError("exclude has a pattern that names nothing", value=str(table["exclude"]), source=path)
    return CheckConfiguration(**{key: tuple(value) for key, value in table.items()})


def _refusal(path: str, data: bytes) -> UsageError | None:
    """The error for a file that would take too much time and memory; None for any other."""
    if len(data) > MAX_BYTES:
        return UsageError("the configuration is too large", value=f"more than {MAX_BYTES >> 10} KiB", source=path)
    found = long_line(data.decode(errors="replace"))
    if found is None:
        return None
    number, length = found
    return UsageError(
        "line too long in the configuration", value=f"{length} characters", source=f"{path}, line {number}"
    )
