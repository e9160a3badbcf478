"""Results as an aligned text table and as a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interleave import Spread
from machine import describe_machine, describe_versions


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: two blanks between columns, the first left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def set_line(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells]).rstrip()

    return "\n".join([set_line(lines[0]), *map(set_line, lines[1:])])


def format_spread(value: Spread) -> str:
    """`12.3 (11.9-12.8)`: median and range, with three significant digits."""
    return f"{_digits(value.median)} ({_digits(value.smallest)}-{_digits(value.largest)})"


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_machine(
    machine: Mapping[str, object],
    versions: Mapping[str, str],
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """A line for the machine, one for the versions, and one for each further environment."""
    lines = [
        f"{machine['processor']}, {machine['usable_cpus']} CPUs, Linux {machine['kernel']}",
        _format_named(versions),
    ]
    return "\n".join(
        [*lines, *(f"{name}: {_format_named(packages)}" for name, packages in (environments or {}).items())]
    )


def _format_named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def envelope(bench: str, *, settings: Mapping[str, object], commands: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The keys of the JSON result that all benches share; a bench adds its measurements to them."""
    return {
        "schema": 1,
        "bench": bench,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": dict(settings),
        "commands": {name: list(lines) for name, lines in commands.items()},
    }


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Effect: writes the file, replacing an existing one in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)
