"""The one place that reads the environment, catches errors and decides the exit code."""

from __future__ import annotations

import os
import sys

from cpulaunch.records.errors import CpulaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INSPECTING = ("probe", "profiles", "doctor")
LAUNCHING = ("run", "plan", "torchrun")
INTERRUPTED = 130
BROKEN_PIPE = 141


def run_command_line(arguments: Sequence[str]) -> int:
    """The exit code for a command line.

    Effect: runs it; errors go to stderr in two lines; all output is written when it returns.
    """
    if sys.stderr is None:  # Closed from the start: print(file=None) would write warnings to stdout.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _code_of(arguments)
        if sys.stdout is not None:  # None where the descriptor was closed from the start.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _code_of(arguments: Sequence[str]) -> int:
    try:
        return dispatch(arguments, os.environ)
    except CpulaunchError as error:
        from cpulaunch.cli.terminal import notify

        notify(f"error: {error}", os.environ)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def dispatch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of the command the first argument names; `run` when it names none."""
    first = arguments[0] if arguments else "--help"
    if first in INSPECTING:
        from cpulaunch.cli.app import run_app

        return run_app(arguments, environ)
    from cpulaunch.cli.run import run

    rest = arguments[1:] if first in LAUNCHING else arguments or ["--help"]
    return run(rest, environ, only_plan=first == "plan", torchrun=first == "torchrun")
