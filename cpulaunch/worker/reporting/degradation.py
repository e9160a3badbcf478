"""Warnings of a worker: a line on stderr and an event; a setting that cannot be applied is fatal under --strict."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.reporting.process_identity import is_worker

STRICT_EXIT_CODE = 125


def degraded(settings: TorchSettings, setting: str, reason: str) -> None:
    """Effect: warns that a setting is not in force, on stderr and as an event; under --strict exits with code 125.

    Child processes of the worker warn under --strict only, because the worker has printed the same warning.
    """
    if settings.strict or is_worker():
        report_event("degraded", setting=setting, reason=reason)
        _print_warning(settings, f"{_display_name(setting)}: {reason}")
    if settings.strict:
        _exit_strict(settings.index)


def warned(settings: TorchSettings, text: str) -> None:
    """Effect: prints a warning on stderr and reports it as an event; does nothing in child processes."""
    if is_worker():
        report_event("warning", text=text)
        _print_warning(settings, text)


def _print_warning(settings: TorchSettings, text: str) -> None:
    line = f"cpulaunch: worker {settings.index}: warning: {' '.join(text.split())}\n"
    with suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


def _display_name(setting: str) -> str:
    """The flag of a setting; for a setting without a flag its name in words."""
    from cpulaunch.records.settings import setting_specs

    spec = setting_specs().get(setting)
    return spec.flag if spec else setting.replace("_", " ")


def _exit_strict(index: int) -> None:
    """Effect: exits the process from any thread. An exception would not do, because the program might catch it."""
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # Closed, full, or None.
            file.flush()
    with suppress(OSError):
        os.write(2, f"cpulaunch: worker {index}: stopped because of --strict\n".encode())
    os._exit(STRICT_EXIT_CODE)
