"""The message with which a program that failed ended. Pure."""

from __future__ import annotations

import re

from cpulaunch.records.errors import escaped

MAX_MESSAGE = 300
OWN, OWN_REPORT = "cpulaunch:", "cpulaunch: report:"
LIBRARY_LOG = re.compile(r"\[[IW]\d{4} |[IW]\d{4} \d\d:\d\d:|(?:VERBOSE|INFO|WARNING|STAGE):\d{4}-\d\d-\d\d ")
"""How torch's libraries (c10, glog, Kineto) begin a line of their logs that is no error."""


def last_message(stderr_tail: bytes) -> str:
    """The last line that the program wrote, without escapes; else the last one of cpulaunch's; "" if there is none.

    What torch's libraries log while the process exits, after the traceback, does not count.
    """
    stripped = (line.strip() for line in stderr_tail.decode(errors="replace").splitlines())
    lines = [line for line in stripped if line and not LIBRARY_LOG.match(line)]
    programs = [line for line in lines if not line.startswith(OWN)]
    others = [line for line in lines if not line.startswith(OWN_REPORT)]
    return escaped((programs or others or [""])[-1])[:MAX_MESSAGE]
