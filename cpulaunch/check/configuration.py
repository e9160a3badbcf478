"""`[tool.cpulaunch.check]` of a pyproject.toml: which rules count and which files are left out."""

import tomllib
from pathlib import PurePath

from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

KEYS = ("select", "ignore", "exclude")


@record
class CheckConfiguration:
    """`select`: rules, empty for all; `ignore`: rules that do not count; `exclude`: patterns of paths."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def configuration(path: str, data: bytes) -> CheckConfiguration:
    """The table of a file; all defaults if it has none. Raises: UsageError."""
    try:
        table = tomllib.loads(data.decode()).get("tool", {}).get("cpulaunch", {}).get("check", {})
    except (ValueError, AttributeError, RecursionError) as error:  # tomllib raises ValueError for huge numbers, too.
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
