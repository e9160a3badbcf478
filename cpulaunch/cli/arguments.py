"""The parser of the command lines of run, plan and torchrun: the options are the settings and the few below.

It is written by hand because all arguments after the program are the program's, and because a launch has to be fast:
importing an argument-parsing library takes longer than probing the machine.
"""

from __future__ import annotations

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError, quoted
from cpulaunch.records.request import Program, ProgramKind
from cpulaunch.records.settings import JOB_SETTINGS, setting_specs
from cpulaunch.records.value_types import SettingSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


SWITCHES = {
    "--module": "run SCRIPT as a module, like `python -m` (also -m)",
    "--no-python": "run SCRIPT as a command, without Python",
    "--from-mpi": "take the ranks that mpirun starts: same as --scheduler mpi",
    "--dry-run": "print the plan and start nothing, like `cpulaunch plan`",
    "--json": "print the plan as JSON and start nothing",
    "--brief": "print the plan's table and map only, and start nothing; with --verbose: then run it",
    "--verbose": "print the plan to stderr, then run it",
    "--show-env": "show the values that --env gives in plans, reports and emitted files",
    "--help": "show the help; --help TOPIC: all, or the options of a topic (also -h)",
    "--version": "show the version",
}
FORMATS = ("sh", "slurm", "k8s")
TEXT_OPTIONS = {
    "--emit": ("|".join(FORMATS), "print a shell script, an sbatch script or a Kubernetes manifest; start nothing"),
    "--sysroot": ("DIR", "plan for the captured machine under DIR; start nothing"),
}
ALIASES = {"--from-mpi": {"scheduler": "mpi"}}
"""Switches that set a setting."""
SHORT = {"-m": "--module", "-h": "--help", "-r": "--redirects", "-t": "--tee", "-O": "--optimize", "-q": "--quiet"}
ATTACHED = ("-r", "-t", "-O")
"""Short options whose value may follow without a space: -t3 as in argparse, -O2 as in compilers."""
EXCLUSIVE = (("--json", "--emit"), ("--json", "--brief"), ("--brief", "--emit"), ("--verbose", "--quiet"))
EMPTY_IS_UNSET = ("rdzv_endpoint", "rdzv_conf", "local_ranks_filter")
"""Settings that an empty text leaves unset: it is torchrun's default for them, and scripts pass it."""


class UnknownOptionError(UsageError):
    """An option that cpulaunch does not have."""


class _Reader:
    """Reads tokens one after the other and collects the options."""

    def __init__(self, tokens: Sequence[str], *, abbreviated: bool = False) -> None:
        self.tokens = list(tokens)
        self.abbreviated = abbreviated
        self.position = 0
        self.values: dict[str, Any] = {}
        self.switches: set[str] = set()
        self.texts: dict[str, str] = {}

    def next_option(self) -> str | None:
        """The next token if it is an option, else None; `--` ends the options."""
        if self.position >= len(self.tokens):
            return None
        token = self.tokens[self.position]
        if token == "--":
            self.position += 1
            return None
        if not token.startswith("-") or token == "-":
            return None
        self.position += 1
        return token

    def read(self, token: str) -> None:
        """Store one option and its value. Raises: UsageError."""
        name, equals, text = token.partition("=")
        if token[:2] in ATTACHED and len(name) > 2:
            name, equals, text = token[:2], "=", token[2:]
        flag = canonical(name)
        if self.abbreviated or not (flag in SWITCHES or flag in TEXT_OPTIONS or _is_setting(flag)):
            flag = unabbreviated(flag) if self.abbreviated else self._job_option(flag)
        inline = text if equals else None
        if flag in SWITCHES:
            if flag == "--help" and inline:
                self.tokens.insert(self.position, inline)
            elif inline is not None:
                raise UsageError(f"{flag} takes no value", value=token, hint=f"cpulaunch {flag}")
            self.switches.add(flag)
            self.values |= ALIASES.get(flag, {})
        elif flag in TEXT_OPTIONS:
            self.texts[flag] = self._value(flag, inline, TEXT_OPTIONS[flag][0])
        else:
            self._read_setting(flag, inline)

    def _job_option(self, flag: str) -> str:
        """The job option that this text abbreviates, as under torchrun; the text itself if there is none.

        An abbreviation that fits other options too counts only where an option has already made this a job.
        """
        try:
            full = unabbreviated(flag)
        except UsageError:
            return flag
        if full[2:].replace("-", "_") not in JOB_SETTINGS:
            return flag
        others = any(spec.flag.startswith(flag) for spec in setting_specs().values() if spec.name not in JOB_SETTINGS)
        return flag if others and not any(name in self.values for name in JOB_SETTINGS) else full

    def _value(self, flag: str, inline: str | None, metavar: str) -> str:
        """The text after `flag`. Raises: UsageError if there is none."""
        if inline is not None:
            return inline
        if self.position >= len(self.tokens):
            raise UsageError(f"{flag} needs a value", hint=f"{flag} {metavar}")
        self.position += 1
        return self.tokens[self.position - 1]

    def _read_setting(self, flag: str, inline: str | None) -> None:
        """Store the value of one setting. Raises: UsageError."""
        spec, negated = setting_of(flag)
        value_type = spec.value_type
        if value_type.flag:
            if inline not in (None, "true", "false"):
                hint = f"{spec.flag} or {spec.negative_flag}"
                raise UsageError(f"{flag} takes no value", value=f"{flag}={inline}", hint=hint)
            self.values[spec.name] = (inline != "false") is not negated
            return
        text = self._value(flag, inline, value_type.metavar)
        if not text and spec.name in EMPTY_IS_UNSET:
            return
        value = parse(spec, text)
        self.values[spec.name] = self.values.get(spec.name, ()) + value if value_type.repeatable else value


def canonical(name: str) -> str:
    """An option's long form with dashes."""
    return SHORT.get(name, "--" + name[2:].replace("_", "-") if name.startswith("--") else name)


def unabbreviated(flag: str) -> str:
    """The option of torchrun that starts with this text, as argparse completes it; the flag itself if there is none.

    Raises: UsageError if several options start with it.
    """
    table = setting_specs()
    known = [table[name].flag for name in (*JOB_SETTINGS, "log_dir")] + ["--module", "--no-python", "--help"]
    if not flag.startswith("--") or flag in known or flag[2:].replace("-", "_") in table or flag in SWITCHES:
        return flag
    matches = [each for each in known if each.startswith(flag)]
    if len(matches) > 1:
        raise UsageError("ambiguous option", value=flag, hint=f"it may mean {', '.join(matches)}")
    return matches[0] if matches else flag


def _is_setting(flag: str) -> bool:
    """Whether this is the name of a setting, or its negative form."""
    return flag.startswith("--") and flag[2:].removeprefix("no-").replace("-", "_") in setting_specs()


def setting_of(flag: str) -> tuple[SettingSpec, bool]:
    """The setting of a flag, and whether the flag is the negative form (`--no-smt`).

    Raises: UnknownOptionError.
    """
    name = flag[2:].replace("-", "_")
    table = setting_specs()
    if flag.startswith("--") and name in table:
        return table[name], False
    positive = table.get(name.removeprefix("no_")) if flag.startswith("--no-") else None
    if positive is not None and positive.value_type.flag:
        return positive, True
    raise UnknownOptionError("unknown option", value=flag)


def parse(spec: SettingSpec, text: str) -> Any:
    """The value of a setting written as text. Raises: UsageError."""
    try:
        return spec.value_type.from_text(text)
    except ValueError as error:
        from cpulaunch.cli.corrections.options import value_hint

        hint = value_hint(spec.name, spec.flag, text, spec.value_type.choices)
        shown = "(hidden)" if spec.name == "env" else quoted(text)  # A password, given in a wrong form, is still one.
        raise UsageError(
            f"invalid value {shown} for {spec.flag}",
            value=error,
            hint=hint or f"{spec.flag} {spec.value_type.metavar}",
        ) from None


def _unknown_options(tokens: Sequence[str]) -> UsageError:
    """The error for the unknown options among the tokens before the program."""
    from cpulaunch.cli.corrections.options import unknown_options_error

    specs = setting_specs().values()
    known = [spec.flag for spec in specs] + [spec.negative_flag for spec in specs if spec.value_type.flag]
    return unknown_options_error(
        tokens, canonical=canonical, values=value_count, known=[*known, *SWITCHES, *TEXT_OPTIONS]
    )


def value_count(flag: str) -> int | None:
    """How many values follow this option; None if there is no such option."""
    if flag in SWITCHES:
        return 0
    if flag in TEXT_OPTIONS:
        return 1
    if flag[:2] in ATTACHED and flag[1:2] != "-":
        return 0
    try:
        spec, _ = setting_of(flag)
    except UnknownOptionError:
        return None
    return 0 if spec.value_type.flag else 1


def parse_command_line(tokens: Sequence[str], *, interpreter: str, torchrun: bool = False) -> CommandLine:
    """The parsed command line of run, plan or `torchrun`. Raises: UsageError."""
    reader = _Reader(tokens, abbreviated=torchrun)
    try:
        while "--help" not in reader.switches and (token := reader.next_option()) is not None:
            reader.read(token)
    except UnknownOptionError:
        raise _unknown_options(tokens) from None
    output_format = reader.texts.get("--emit")
    if output_format is not None and output_format not in FORMATS:
        raise UsageError(
            f"invalid value {output_format!r} for --emit",
            value=f"expected one of {', '.join(FORMATS)}",
            hint=f"--emit {'|'.join(FORMATS)}",
        )
    _check_exclusive(reader)
    return CommandLine(
        values=reader.values,
        program=_program(reader, interpreter),
        switches=frozenset(reader.switches),
        emit=output_format,
        sysroot=reader.texts.get("--sysroot"),
        torchrun=torchrun,
    )


def _check_exclusive(reader: _Reader) -> None:
    """Raises: UsageError if options ask for different things at once."""
    given = {*reader.switches, *reader.texts, *(["--quiet"] if reader.values.get("quiet") else [])}
    for pair in EXCLUSIVE:
        if given.issuperset(pair):
            raise UsageError(f"{' and '.join(pair)} exclude each other", hint="give one of them")


def _program(reader: _Reader, interpreter: str) -> Program | None:
    run_path = bool(reader.values.get("run_path"))  # It has precedence over -m and --no-python, as in torchrun.
    if {"--module", "--no-python"} <= reader.switches and not run_path:
        raise UsageError("-m and --no-python exclude each other", hint="give one of them")
    rest = reader.tokens[reader.position :]
    if not rest:
        return None
    kind: ProgramKind = "script"
    if "--module" in reader.switches and not run_path:
        kind = "module"
        if rest[0][:1].isdigit():  # No module has such a name: it is numactl's -m.
            raise _unknown_options(reader.tokens)
    elif "--no-python" in reader.switches and not run_path:
        kind = "command"
    return Program(
        kind=kind, target=rest[0], args=tuple(rest[1:]), interpreter="" if kind == "command" else interpreter
    )
