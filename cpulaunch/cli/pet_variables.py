"""PET_*: torchrun's options as environment variables, between the command line and the profiles.

Source: torch 2.13, torch/distributed/argparse_util.py: PET_ and the option's name in capitals; switches are numbers.
"""

from __future__ import annotations

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import replace
from cpulaunch.records.request import Layer, Program
from cpulaunch.records.settings import JOB_SETTINGS, SettingSpec, setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PREFIX = "PET_"
KINDS = {"PET_MODULE": "--module", "PET_NO_PYTHON": "--no-python"}
"""Switches that say what the program is."""
ALONE = ("instances", "cores_per_instance")
"""Settings of the command line that make a launch one of independent copies."""


def with_pet_variables(line: CommandLine, environ: Mapping[str, str], *, interpreter: str) -> CommandLine:
    """The command line with torchrun's variables behind it, if this is a job of ranks.

    Raises: UsageError naming the variable if its value is none of the option's.
    """
    known = [name for name in (*JOB_SETTINGS, "log_dir") if environ.get(PREFIX + name.upper())]
    asked = [
        name
        for name in known
        if name != "log_dir" and not _is_off(setting_specs()[name], environ[PREFIX + name.upper()])
    ]
    job = line.torchrun or any(name in line.values for name in JOB_SETTINGS)
    if asked and not job and any(name in line.values for name in ALONE):
        variables = _listed(asked)
        notice = f"--instances starts independent copies: {variables} in your environment does not count"
        return replace(line, notices=(*line.notices, notice))
    if not asked and not job:
        return line
    values = {name: _parsed(setting_specs()[name], environ[PREFIX + name.upper()]) for name in known}
    beaten = [name for name, value in values.items() if name in line.values and line.values[name] != value]
    layer = Layer(
        origin="environment",
        values=values,
        reasons={name: f"PET_{name.upper()} in your environment" for name in values},
    )
    return replace(
        _with_program(line, environ, run_path=bool(values.get("run_path")), interpreter=interpreter),
        layers=(*line.layers, layer),
        reasons={
            **line.reasons,
            **{name: f"it wins over {_assignment(environ, name)}" for name in beaten},
        },
        notices=(*line.notices, *_beaten_notice(beaten, environ)),
    )


def _listed(names: list[str]) -> str:
    return ", ".join(PREFIX + name.upper() for name in names)


def _assignment(environ: Mapping[str, str], name: str) -> str:
    variable = PREFIX + name.upper()
    return f"{variable}={environ[variable]}"


def _beaten_notice(names: list[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    if not names:
        return ()
    flags = ", ".join(setting_specs()[name].flag for name in names)
    variables = ", ".join(_assignment(environ, name) for name in names)
    return (f"{flags} on the command line {'wins' if len(names) == 1 else 'win'} over {variables} in your environment",)


def _is_off(spec: SettingSpec, text: str) -> bool:
    """Whether this is a switch that is off, which asks for nothing."""
    return spec.value_type.flag and text.strip() == "0"


def _parsed(spec: SettingSpec, text: str) -> Any:
    variable = PREFIX + spec.name.upper()
    if spec.value_type.flag:
        return _switch(variable, text)
    try:
        return spec.value_type.from_text(text)
    except ValueError as error:
        raise UsageError(
            str(error),
            value=f"{variable}={text}",
            source="your environment",
            hint=f"{variable}={spec.value_type.metavar}, or unset it",
        ) from None


def _switch(variable: str, text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise UsageError(
            "expected 1 or 0", value=f"{variable}={text}", source="your environment", hint=f"{variable}=1"
        ) from None


def _with_program(line: CommandLine, environ: Mapping[str, str], *, run_path: bool, interpreter: str) -> CommandLine:
    """The command line with what PET_MODULE, PET_NO_PYTHON and PET_RUN_PATH say the program is."""
    wanted = {
        flag for variable, flag in KINDS.items() if environ.get(variable) and _switch(variable, environ[variable])
    }
    said = line.switches & set(KINDS.values())
    run_path = line.values.get("run_path", run_path)
    if line.program is None or (said and not run_path):
        return line
    if run_path:
        kind = "script"
    elif len(wanted) > 1:
        raise UsageError(
            "contradicting variables",
            value="PET_MODULE and PET_NO_PYTHON",
            source="your environment",
            hint="unset one of the two",
        )
    else:
        kind = "module" if "--module" in wanted else "command" if wanted else line.program.kind
    program = Program(
        kind=kind,  # type: ignore[arg-type]
        target=line.program.target,
        args=line.program.args,
        interpreter="" if kind == "command" else interpreter,
    )
    return replace(line, program=program)
