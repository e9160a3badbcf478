"""The message with which a program that failed ended. Pure."""

from __future__ import annotations

import re

from cpulaunch.records.errors import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_MESSAGE = 300
OWN, OWN_REPORT = "cpulaunch:", "cpulaunch: report:"
LIBRARY_LOG = re.compile(r"\[[IW]\d{4} |[IW]\d{4} \d\d:\d\d:|(?:VERBOSE|INFO|WARNING|STAGE):\d{4}-\d\d-\d\d ")
"""How torch's libraries (c10, glog, Kineto) begin a line of their logs that is no error."""
RANK = re.compile(r"(?:\[\d+\] )?(?:\[rank\d+\]: ?)?")
"""What stands before a line: a worker's number, by cpulaunch, and the rank, by torch."""
WARNING = re.compile(r".+:\d+: \w*Warning: ")
"""How Python begins a warning, whose source line follows, indented."""
IGNORED = re.compile(r"Exception ignored |Error in atexit\._run_exitfuncs:")
"""How Python begins an error that ends nothing, such as one of a `__del__`. A traceback follows."""


def last_message(stderr_tail: bytes) -> str:
    """The last line that the program wrote, without escapes; else the last one of cpulaunch's; "" if there is none.

    What Python and torch's libraries write while the process exits, after the traceback, does not count.
    """
    lines = [line.strip() for line in _without_notices(stderr_tail.decode(errors="replace").splitlines())]
    programs = [line for line in lines if not line.startswith(OWN)]
    others = [line for line in lines if not line.startswith(OWN_REPORT)]
    return escaped((programs or others or [""])[-1])[:MAX_MESSAGE]


def _without_notices(lines: Iterable[str]) -> Iterator[str]:
    """The lines that are not blank, without logs of libraries, warnings, and errors that were ignored."""
    in_warning = in_ignored = False
    for line in lines:
        text = RANK.sub("", line, count=1)
        if not text.strip():
            continue
        if (in_warning or in_ignored) and text[0].isspace():
            continue
        if in_ignored:
            in_ignored = text.startswith("Traceback ")
            continue
        in_warning, in_ignored = bool(WARNING.match(text)), bool(IGNORED.match(text))
        if not (in_warning or in_ignored or LIBRARY_LOG.match(text.lstrip())):
            yield line
