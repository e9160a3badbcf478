"""One worker without logs: this process becomes the worker."""

from __future__ import annotations

import os
import sys

from cpulaunch.launch.process.bind import apply_binding
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.program import exec_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")
"""Python ignores these from its start; programs expect the default action. Source: Python/pylifecycle.c."""


def flush_standard_streams() -> None:
    """Effect: writes what sys.stdout and sys.stderr buffer, which a fork would copy and an exec lose."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:  # None where the descriptor was closed at the start.
            file.flush()


def restore_dispositions() -> None:
    """Effect: gives the signals that Python ignores their default action again. An exec resets handlers by itself."""
    from cpulaunch.system.signals import signal

    for name in IGNORED_BY_PYTHON:
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_DFL)


def reset_dispositions() -> None:
    """Effect: gives every signal that this Python handles or ignores its default action.

    For a forked child that unblocks signals before it executes: a handler would swallow a signal that arrives then.
    """
    from cpulaunch.system.signals import signal

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    restore_dispositions()


def replace_this_process(spec: ExecSpec) -> NoReturn:
    """Effect: this process becomes the worker; its pid, signals and exit code are the worker's.

    Raises: NotExecutableError.
    """
    flush_standard_streams()
    apply_binding(spec.binding)
    if not os.path.basename(spec.path).startswith("python"):  # Python ignores them again, and `signal` takes 3 ms.
        restore_dispositions()
    try:
        os.execve(spec.path, spec.argv, spec.environ)
    except OSError as error:
        raise exec_error(spec.path, error.errno or 0) from None
