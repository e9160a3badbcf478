"""What a person's terminal is like, and printing to it."""

import io
import os
import sys
from collections.abc import Mapping
from typing import Any

from cpulaunch.records.errors import CpulaunchError

NARROWEST, WIDEST = 20, 120


def width() -> int:
    """Columns to write in: the terminal's, at least 20 and at most 120; 80 when there is none."""
    import shutil

    return max(NARROWEST, min(shutil.get_terminal_size((80, 24)).columns, WIDEST))


def color(environ: Mapping[str, str]) -> bool:
    """Whether to colour stdout. Source: no-color.org."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def show(text: str, *, end: str = "\n") -> None:
    """Write text to stdout, if there is one, with "?" for what its encoding lacks.

    Raises: CpulaunchError if it cannot be written (disk full); BrokenPipeError if nobody reads.
    """
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors=_on_error(text, stdout.encoding))
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # What is still buffered goes nowhere.
        raise CpulaunchError(
            "cannot write the output", value=error.strerror, source="stdout", hint="send it elsewhere: > FILE"
        ) from None


def complain(text: str) -> None:
    """Write text to stderr, if it takes any: an exit code must not be lost because nobody reads why."""
    left = f"{text}\n".encode(sys.stderr.encoding, "backslashreplace")
    try:
        while left:  # Not by print: what cannot be written would stay in Python's buffer, and fail again later.
            left = left[os.write(sys.stderr.fileno(), left) :]
    except OSError:
        return


def _on_error(text: str, encoding: str) -> str:
    """How to write what the encoding lacks: bytes of odd file names as they are, unless there is more."""
    try:
        text.encode(encoding, "surrogateescape")
    except UnicodeEncodeError:
        return "replace"
    return "surrogateescape"


def print_json(value: Any) -> None:
    """Write one JSON object and nothing else."""
    import json

    show(json.dumps(value, indent=2))
