"""One worker without logs: this process becomes it."""

from __future__ import annotations

import os
import sys

from cpulaunch.launch.process.bind import apply_binding
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.program import exec_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")
"""Python ignores these from its start on; a program expects their default. Source: Python/pylifecycle.c."""


def flush_python() -> None:
    """Effect: what this Python has printed is written, before a fork would copy it or exec lose it."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:  # None where the descriptor was closed from the start.
            file.flush()


def restore_dispositions() -> None:
    """Effect: signals that this Python ignores for itself have their default action again (exec resets handlers)."""
    import signal

    for name in IGNORED_BY_PYTHON:
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_DFL)


def default_dispositions() -> None:
    """Effect: every signal this Python handles or ignores for itself has its default action.

    For a forked child that unblocks signals before it executes: what arrives then is not lost in a handler.
    """
    import signal

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    restore_dispositions()


def replace_this_process(spec: ExecSpec) -> NoReturn:
    """Effect: this process is the worker: same pid, signals and exit code. Raises: NotExecutableError."""
    flush_python()
    apply_binding(spec.binding)
    if not os.path.basename(spec.path).startswith("python"):  # It would ignore them again; `signal` takes 3 ms.
        restore_dispositions()
    try:
        os.execve(spec.path, spec.argv, spec.environ)
    except OSError as error:
        raise exec_failure(spec.path, error.errno or 0) from None
