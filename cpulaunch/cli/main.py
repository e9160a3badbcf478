"""The entry point: the only module that reads the environment, catches errors and chooses the exit code."""

from __future__ import annotations

import os
import sys

from cpulaunch.records.errors import CpulaunchError
from cpulaunch.system.interrupts import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INSPECTION_COMMANDS = ("probe", "profiles", "doctor")
LAUNCH_COMMANDS = ("run", "plan", "torchrun")
FOREIGN_COMMANDS = ("ipexrun", "run_cpu")
"""Launchers whose command lines run as they are."""
BROKEN_PIPE = 141


def run_command_line(arguments: Sequence[str]) -> int:
    """The exit code of a command line.

    Effect: runs the command; an error is at most two lines on stderr, with --json one; all output is flushed.
    """
    if sys.stderr is None:  # The descriptor is closed: print(file=None) would write warnings to stdout.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _exit_code(arguments)
        if sys.stdout is not None:  # None if the descriptor is closed.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        return dispatch(arguments, os.environ)
    except CpulaunchError as error:
        _print_error(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(error: CpulaunchError, arguments: Sequence[str]) -> None:
    from cpulaunch.cli.terminal import notify, notify_json

    if any(word.startswith("--json") for word in arguments):
        from cpulaunch.cli.arguments import canonical, value_count
        from cpulaunch.cli.corrections.json_option import asks_for_json
        from cpulaunch.view.message_view import error_json

        if asks_for_json(arguments, canonical=canonical, values=value_count):
            notify_json(error_json(error))
            return
    notify(f"error: {error}", os.environ)


def dispatch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of the command that the first argument names, by default `run`."""
    first = arguments[0] if arguments else "--help"
    if first in INSPECTION_COMMANDS:
        from cpulaunch.cli.app import run_app

        return run_app(arguments, environ)
    if first == "translate":
        from cpulaunch.cli.translate import translate

        return translate(arguments[1:], environ)
    if first == "completion":
        from cpulaunch.cli.usage import print_completion

        return print_completion(arguments[1:], environ)
    from cpulaunch.cli.run import run

    if first in FOREIGN_COMMANDS:
        from cpulaunch.cli.translate import run_foreign

        return run_foreign(first, arguments[1:], environ, launch=dispatch)
    rest = arguments[1:] if first in LAUNCH_COMMANDS else arguments or ["--help"]
    return run(rest, environ, only_plan=first == "plan", torchrun=first == "torchrun", dispatch=dispatch)
