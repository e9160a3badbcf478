"""What to run where the program of a command line is no existing Python file."""

from __future__ import annotations

import os

from cpulaunch.cli.corrections.commands import restated, suggestion
from cpulaunch.cli.corrections.programs import runnable
from cpulaunch.launch.process.program import check_program, is_meant
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import CpulaunchError, NotFoundError
from cpulaunch.records.record import replace
from cpulaunch.records.request import WorkerPython

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.records.request import Program


def other_command(line: CommandLine, tokens: Sequence[str], *, only_plan: bool) -> list[str] | None:
    """The command line that was meant, if the program's name is a command of cpulaunch; None if it is not.

    A file of that name is the program, unless another user put it there, and so is what follows `--`.
    Raises: CpulaunchError.
    """
    program = line.program
    if program is None or is_meant(program.target):
        return None
    before = _before(program, tokens)
    if before[-1:] == ["--"]:
        return None
    return restated(program.target, before, program.args, plans=only_plan, ranks=line.torchrun)


def _before(program: Program, tokens: Sequence[str]) -> list[str]:
    """What was typed before the program."""
    return list(tokens[: len(tokens) - 1 - len(program.args)])


def recognized(line: CommandLine, tokens: Sequence[str], environ: Mapping[str, str], *, only_plan: bool) -> CommandLine:
    """The command line with its program as it can run. A plan of a program that cannot start has a warning.

    Raises: NotFoundError or NotExecutableError for a launch of such a program.
    """
    if line.program is None or line.sysroot is not None:
        return line
    try:
        program = runnable(line.program, environ)
        if not os.path.exists(program.target) and program.kind == "script":
            _check_script(program, _before(line.program, tokens), environ)
    except CpulaunchError as error:
        if not only_plan:
            raise
        hint = "" if error.hint is None else f"; {error.hint}"
        return replace(line, warnings=(*line.warnings, error.summary + hint))
    return _with_programs_python(line, program)


def _with_programs_python(line: CommandLine, program: Program) -> CommandLine:
    """The command line with its program, and with the Python that it names, as in `python a.py`; --python wins."""
    if program.kind == "command" or line.python is None or program.interpreter == line.python.path:
        return replace(line, program=program)
    if "python" in line.values:
        return replace(line, program=replace(program, interpreter=line.python.path))
    beside = os.path.dirname(program.target) == os.path.dirname(program.interpreter)
    reason = f"the Python of {os.path.basename(program.target)}" if beside else "python on the command line"
    return replace(line, program=program, python=WorkerPython(path=program.interpreter, origin="cli", reason=reason))


def _check_script(program: Program, before: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raises: NotFoundError, with a hint at the command or file that was probably meant."""
    hint = suggestion(program.target, before, program.args)
    if hint is not None and not os.path.exists(f"{program.target}.py"):
        raise NotFoundError(f"no command or script named {program.target!r}", hint=hint)
    check_program(program, environ)
