"""A setting that could not do what it says: told once, reported, and fatal only under --strict."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.reporting.process_identity import is_worker

STRICT_EXIT_CODE = 125


def degraded(settings: TorchSettings, setting: str, reason: str) -> None:
    """Effect: one line on stderr and an event; under --strict the process ends with exit code 125.

    In children of the worker only --strict is heard: the worker itself has said it.
    """
    if settings.strict or is_worker():
        report_event("degraded", setting=setting, reason=reason)
        _say(settings, f"{_named(setting)}: {reason}")
    if settings.strict:
        _end(settings.index)


def warned(settings: TorchSettings, text: str) -> None:
    """Effect: one line on stderr and an event, from the worker itself."""
    if is_worker():
        report_event("warning", text=text)
        _say(settings, f"warning: {text}")


def _say(settings: TorchSettings, text: str) -> None:
    line = f"cpulaunch: worker {settings.index}: {' '.join(text.split())}\n"
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


def _named(setting: str) -> str:
    """The setting's flag, or its own name where it is no flag's."""
    from cpulaunch.records.settings import setting_specs

    spec = setting_specs().get(setting)
    return spec.flag if spec else setting.replace("_", " ")


def _end(index: int) -> None:
    """Effect: this process ends, from whatever thread: an exception might be caught by the program."""
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # Closed, full, or None.
            file.flush()
    with suppress(OSError):
        os.write(2, f"cpulaunch: worker {index}: ended by --strict\n".encode())
    os._exit(STRICT_EXIT_CODE)
