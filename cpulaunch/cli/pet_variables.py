"""PET_*: torchrun's options as environment variables, with a precedence between the command line and the profiles.

Source: torch 2.13, torch/distributed/argparse_util.py: PET_ and the option's name in capitals; switches are numbers.
"""

from __future__ import annotations

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import replace
from cpulaunch.records.request import Layer
from cpulaunch.records.settings import JOB_SETTINGS, setting_specs
from cpulaunch.records.value_types import SettingSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.records.request import Program, ProgramKind

PREFIX = "PET_"
PROGRAM_SWITCHES = {"PET_MODULE": "--module", "PET_NO_PYTHON": "--no-python"}
"""Variables that choose the kind of the program."""
INSTANCE_SETTINGS = ("instances", "cores_per_instance")
"""Settings of the command line that make a launch one of independent copies."""


def with_pet_variables(line: CommandLine, environ: Mapping[str, str], *, interpreter: str) -> CommandLine:
    """The command line with torchrun's variables as a layer below it, if this is a job of ranks.

    Raises: UsageError naming the variable if its value is invalid.
    """
    specs = setting_specs()
    present = [name for name in (*JOB_SETTINGS, "log_dir") if environ.get(_variable(name))]
    effective = [name for name in present if name != "log_dir" and not _is_off(specs[name], environ)]
    is_job = line.torchrun or any(name in line.values for name in JOB_SETTINGS)
    if effective and not is_job and any(name in line.values for name in INSTANCE_SETTINGS):
        variables = ", ".join(map(_variable, effective))
        notice = f"{variables}: ignored, because --instances starts independent copies, not ranks"
        return replace(line, notices=(*line.notices, notice))
    if not effective and not is_job:
        return line
    values = {name: _parse(specs[name], environ) for name in present}
    overridden = [name for name, value in values.items() if name in line.values and line.values[name] != value]
    layer = Layer(
        origin="environment",
        values=values,
        reasons={name: f"{_variable(name)} in the environment" for name in values},
    )
    return replace(
        line,
        program=_program(line, environ, run_path=bool(values.get("run_path")), interpreter=interpreter),
        layers=(*line.layers, layer),
        reasons={**line.reasons, **{name: f"overrides {_assignment(name, environ)}" for name in overridden}},
        notices=(*line.notices, *_override_notice(overridden, environ)),
    )


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _assignment(name: str, environ: Mapping[str, str]) -> str:
    return f"{_variable(name)}={environ[_variable(name)]}"


def _override_notice(names: list[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    if not names:
        return ()
    flags = ", ".join(setting_specs()[name].flag for name in names)
    variables = ", ".join(_assignment(name, environ) for name in names)
    verb = "overrides" if len(names) == 1 else "override"
    return (f"{flags} on the command line {verb} {variables} from the environment",)


def _is_off(spec: SettingSpec, environ: Mapping[str, str]) -> bool:
    """Whether the variable disables a switch, which requests nothing."""
    return spec.value_type.flag and environ[_variable(spec.name)].strip() == "0"


def _parse(spec: SettingSpec, environ: Mapping[str, str]) -> Any:
    """The value of a setting's variable. Raises: UsageError."""
    if spec.value_type.flag:
        return _switch(_variable(spec.name), environ)
    try:
        return spec.value_type.from_text(environ[_variable(spec.name)])
    except ValueError as error:
        raise UsageError(
            f"invalid value in {_assignment(spec.name, environ)}",
            value=error,
            source="environment",
            hint=f"{_variable(spec.name)}={spec.value_type.metavar}, or unset it",
        ) from None


def _switch(variable: str, environ: Mapping[str, str]) -> bool:
    try:
        return bool(int(environ[variable]))
    except ValueError:
        raise UsageError(
            f"invalid value in {variable}={environ[variable]}",
            value="expected 1 or 0",
            source="environment",
            hint=f"{variable}=1, or unset it",
        ) from None


def _program(line: CommandLine, environ: Mapping[str, str], *, run_path: bool, interpreter: str) -> Program | None:
    """The program, of the kind that PET_MODULE, PET_NO_PYTHON and PET_RUN_PATH choose."""
    switches = {flag for name, flag in PROGRAM_SWITCHES.items() if environ.get(name) and _switch(name, environ)}
    run_path = line.values.get("run_path", run_path)
    if line.program is None or (line.switches & set(PROGRAM_SWITCHES.values()) and not run_path):
        return line.program
    kind: ProgramKind = line.program.kind
    if run_path:
        kind = "script"
    elif len(switches) > 1:
        raise UsageError(
            "PET_MODULE and PET_NO_PYTHON exclude each other", source="environment", hint="unset one of them"
        )
    elif switches:
        kind = "module" if "--module" in switches else "command"
    return replace(line.program, kind=kind, interpreter="" if kind == "command" else interpreter)
