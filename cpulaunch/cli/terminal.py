"""What a person's terminal is like, and printing to it."""

import sys
from collections.abc import Mapping
from typing import Any


def width() -> int:
    """Columns to write in: the terminal's, at most 120; 80 when there is none."""
    import shutil

    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def color(environ: Mapping[str, str]) -> bool:
    """Whether to colour stdout. Source: no-color.org."""
    return sys.stdout is not None and sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def print_json(value: Any) -> None:
    """Write one JSON object and nothing else."""
    import json

    print(json.dumps(value, indent=2))
