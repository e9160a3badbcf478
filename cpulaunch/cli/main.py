"""The entry point: the only module that reads the environment, catches errors and chooses the exit code."""

from __future__ import annotations

import os
import sys

from cpulaunch.records.errors import CpulaunchError
from cpulaunch.system.interrupts import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INSPECTION_COMMANDS = ("probe", "profiles", "doctor", "calibrate", "check")
LAUNCH_COMMANDS = ("run", "plan", "torchrun")
MEASURING_COMMANDS = ("compare", "tune", "diagnose")
FOREIGN_COMMANDS = ("ipexrun", "run_cpu")
"""Launchers whose command lines run as they are."""
BROKEN_PIPE = 141


def run_command_line(arguments: Sequence[str]) -> int:
    """The exit code of a command line.

    Effect: runs the command; an error is at most two lines on stderr, with --json one; all output is flushed.
    """
    if sys.stderr is None:  # The descriptor is closed: print(file=None) would write warnings to stdout.
        sys.stderr = open(os.devnull, "w", opener=_open_null)  # noqa: SIM115
    try:
        code = _exit_code(arguments)
        if sys.stdout is not None:  # None if the descriptor is closed.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _open_null(path: str, flags: int) -> int:
    """A descriptor of the null device, for reading too: it gets the number of stdin if that is closed as well."""
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        return dispatch(arguments, os.environ)
    except CpulaunchError as error:
        _print_error(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(error: CpulaunchError, arguments: Sequence[str]) -> None:
    from cpulaunch.cli.terminal import NOTICE_SECONDS, notify, notify_json

    seconds = NOTICE_SECONDS if arguments and arguments[0] in MEASURING_COMMANDS else None
    if any(word.startswith("--json") for word in arguments) and _asks_for_json(arguments):
        from cpulaunch.view.message_view import error_json

        notify_json(error_json(error), seconds=seconds)
        return
    notify(f"error: {error}", os.environ, seconds=seconds)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    if arguments[0] in ("compare", "diagnose"):
        from cpulaunch.cli.measuring import compare_arguments, diagnose_arguments

        if arguments[0] == "diagnose":
            return diagnose_arguments.asks_for_json(arguments[1:])
        return compare_arguments.asks_for_json(arguments[1:])
    from cpulaunch.cli.arguments import canonical, value_count

    if arguments[0] == "tune":
        from cpulaunch.cli.measuring import tune_arguments

        return tune_arguments.asks_for_json(arguments[1:], lambda name: value_count(canonical(name)))
    from cpulaunch.cli.corrections.json_option import asks_for_json

    return asks_for_json(arguments, canonical=canonical, values=value_count)


def dispatch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of the command that the first argument names, by default `run`."""
    first = arguments[0] if arguments else "--help"
    if first in INSPECTION_COMMANDS:
        from cpulaunch.cli.app import run_app

        return run_app(arguments, environ)
    if first == "translate":
        from cpulaunch.cli.translate import translate

        return translate(arguments[1:], environ)
    if first in MEASURING_COMMANDS:
        return _measure(arguments, environ)
    if first == "completion":
        from cpulaunch.cli.usage import print_completion

        return print_completion(arguments[1:], environ)
    from cpulaunch.cli.run import run

    if first in FOREIGN_COMMANDS:
        from cpulaunch.cli.translate import run_foreign

        return run_foreign(first, arguments[1:], environ, launch=dispatch)
    rest = arguments[1:] if first in LAUNCH_COMMANDS else arguments or ["--help"]
    return run(rest, environ, only_plan=first == "plan", torchrun=first == "torchrun", dispatch=dispatch)


def _measure(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of a command that measures."""
    from cpulaunch.cli import terminal
    from cpulaunch.cli.arguments import canonical, value_count
    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.cli.run import check_launch, notifier, read_command_line, with_program
    from cpulaunch.cli.usage import print_command_help
    from cpulaunch.plan.levels import level_values

    services = Services(
        environ=environ,
        parse=lambda tokens: read_command_line(tokens, environ),
        resolve=lambda line: with_program(line, environ),
        check=lambda line: check_launch(line, environ)[1],
        host_and_plan=lambda line: check_launch(line, environ),
        levels=lambda host: tuple(level_values(level, host) for level in (2, 3, 4)),
        value_count=lambda name: value_count(canonical(name)),
        print_text=terminal.print_text,
        print_json=terminal.print_json,
        print_help=lambda command: print_command_help(command, environ),
        notify=notifier(environ, json=_asks_for_json(arguments), seconds=terminal.NOTICE_SECONDS),
        width=terminal.width(),
        color=terminal.color(environ),
    )
    if arguments[0] == "diagnose":
        from cpulaunch.cli.measuring.diagnose import diagnose

        return diagnose(arguments[1:], services)
    if arguments[0] == "tune":
        from cpulaunch.cli.measuring.tune import tune

        return tune(arguments[1:], services)
    from cpulaunch.cli.measuring.compare import compare

    return compare(arguments[1:], services)
