"""What a worker tells its launch: one JSON object a line, appended to a file of this worker and its children.

A line is one write to a file opened for appending, so that lines of several processes and threads never mix, and what
was told survives however the process ends. Source: open(2), O_APPEND; POSIX write(2).
"""

from __future__ import annotations

import json
import os

from cpulaunch.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def tell(event: str, **facts: Any) -> None:
    """Effect: the launch knows of the event; without a launch that listens, none. Never raises for a full disk."""
    path = os.environ.get(EVENTS_VARIABLE)
    if not path:
        return
    line = json.dumps({"event": event, "pid": os.getpid(), **facts}, default=str) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return  # The launch is over.
    try:
        os.write(descriptor, line.encode(errors="backslashreplace"))
    except OSError:
        return
    finally:
        os.close(descriptor)
