"""A setting that could not do what it says: told once, reported, and fatal only under --strict."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cpulaunch.torch_settings import TorchSettings
from cpulaunch.worker.events import tell

STRICT_EXIT_CODE = 125


def degraded(settings: TorchSettings, setting: str, reason: str) -> None:
    """Effect: one line on stderr and an event; under --strict the process ends with exit code 125."""
    tell("degraded", setting=setting, reason=reason)
    flag = "--" + setting.replace("_", "-")
    line = f"cpulaunch: worker {settings.index}: {flag}: {' '.join(reason.split())}\n"
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))
    if settings.strict:
        _end(settings.index)


def _end(index: int) -> None:
    """Effect: this process ends, from whatever thread: an exception might be caught by the program."""
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # Closed, full, or None.
            file.flush()
    os.write(2, f"cpulaunch: worker {index}: ended by --strict\n".encode())
    os._exit(STRICT_EXIT_CODE)
