"""The command line of run and plan -> CommandLine. The options are the rows of settings.py and the few below.

Written by hand because everything after the program belongs to it untouched, and because this is the hot path: an
argument-parsing library would cost more than probing the machine.
"""

from __future__ import annotations

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Program, ProgramKind
from cpulaunch.records.settings import JOB_SETTINGS, SettingSpec, setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


SWITCHES = {
    "--json": "print the plan as JSON and start nothing",
    "--dry-run": "print the plan and start nothing, as `cpulaunch plan` does",
    "--verbose": "print the plan on stderr, then run it",
    "--module": "SCRIPT is a module, as in `python -m` (also -m)",
    "--no-python": "SCRIPT is any command, not a Python file",
    "--from-mpi": "mpirun starts the ranks: the same as --scheduler mpi",
    "--help": "show this help (also -h)",
    "--version": "show the version",
}
TEXTS = {
    "--emit": ("sh|slurm|k8s", "print a shell script, a script for sbatch or a Kubernetes manifest; start nothing"),
    "--sysroot": ("DIR", "plan for the captured machine under DIR; starts nothing"),
}
ALIASES = {"--from-mpi": {"scheduler": "mpi"}}
"""Switches that are another way to write a setting."""
EMITS = ("sh", "slurm", "k8s")
SHORT = {"-m": "--module", "-h": "--help", "-r": "--redirects", "-t": "--tee"}


class _Reader:
    """Tokens read one after the other; collects what they say."""

    def __init__(self, tokens: Sequence[str], *, abbreviated: bool = False) -> None:
        self.tokens = list(tokens)
        self.abbreviated = abbreviated
        self.position = 0
        self.values: dict[str, Any] = {}
        self.switches: set[str] = set()
        self.texts: dict[str, str] = {}
        self.literal = False

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

    def argument(self, flag: str, inline: str | None) -> str:
        """The text that belongs to `flag`. Raises: UsageError if there is none."""
        if inline is not None:
            return inline
        if self.position >= len(self.tokens):
            raise UsageError("option needs a value", value=flag, source="command line", hint=f"cpulaunch {flag}=VALUE")
        self.position += 1
        return self.tokens[self.position - 1]

    def read(self, token: str) -> None:
        """Take one option in. Raises: UsageError."""
        name, equals, text = token.partition("=")
        if token[:2] in ("-r", "-t") and len(name) > 2:  # -t3, as argparse reads it
            name, equals, text = token[:2], "=", token[2:]
        flag = canonical(name)
        if self.abbreviated:
            flag = unabbreviated(flag)
        inline = text if equals else None
        if flag in SWITCHES:
            if inline is not None:
                raise UsageError("option takes no value", value=token, source="command line", hint=f"cpulaunch {flag}")
            self.switches.add(flag)
            self.values |= ALIASES.get(flag, {})
        elif flag in TEXTS:
            self.texts[flag] = self.argument(flag, inline)
        else:
            self.set(flag, inline)

    def set(self, flag: str, inline: str | None) -> None:
        """Take one setting's option in. Raises: UsageError."""
        spec, negated = setting_of(flag)
        if spec.value_type.flag:
            value = spec.value_type.from_text(inline) if inline in ("true", "false") else inline is None
            if inline not in (None, "true", "false"):
                raise UsageError("option takes no value", value=f"{flag}={inline}", source="command line", hint=flag)
            self.values[spec.name] = value is not negated
            return
        text = self.argument(flag, inline)
        if not text and spec.name in EMPTY_IS_NONE:
            return
        value = parse(spec, text)
        self.values[spec.name] = self.values.get(spec.name, ()) + value if spec.value_type.repeatable else value


def canonical(name: str) -> str:
    """An option's one spelling: short forms and underscores resolved."""
    return SHORT.get(name, "--" + name[2:].replace("_", "-") if name.startswith("--") else name)


EMPTY_IS_NONE = ("rdzv_endpoint", "rdzv_conf", "local_ranks_filter")
"""Settings whose default torchrun writes as an empty text, so that scripts pass one."""


def unabbreviated(flag: str) -> str:
    """torchrun's option that this is the beginning of, as argparse would take it; the flag itself if there is none.

    Raises: UsageError if it is the beginning of several.
    """
    table = setting_specs()
    known = [table[name].flag for name in (*JOB_SETTINGS, "log_dir")] + ["--module", "--no-python", "--help"]
    if not flag.startswith("--") or flag in known or flag[2:].replace("-", "_") in table or flag in SWITCHES:
        return flag
    meant = [each for each in known if each.startswith(flag)]
    if len(meant) > 1:
        raise UsageError("ambiguous option", value=flag, source="command line", hint=f"one of {', '.join(meant)}")
    return meant[0] if meant else flag


def setting_of(flag: str) -> tuple[SettingSpec, bool]:
    """The setting of a flag, and whether the flag is the negative form (`--no-smt`).

    Raises: UsageError for an unknown option.
    """
    name = flag[2:].replace("-", "_")
    table = setting_specs()
    if flag.startswith("--") and name in table:
        return table[name], False
    positive = table.get(name.removeprefix("no_")) if flag.startswith("--no-") else None
    if positive is not None and positive.value_type.flag:
        return positive, True
    raise UsageError("unknown option", value=flag, source="command line", hint=_nearest(flag))


def parse(spec: SettingSpec, text: str) -> Any:
    """The value of a setting written as text. Raises: UsageError."""
    try:
        return spec.value_type.from_text(text)
    except ValueError as error:
        raise UsageError(
            f"{spec.flag}: {error}",
            value=repr(text),
            source="command line",
            hint=f"cpulaunch {spec.flag} {spec.value_type.metavar}",
        ) from None


def _nearest(flag: str) -> str:
    import difflib

    known = [spec.flag for spec in setting_specs().values()] + [*SWITCHES, *TEXTS]
    known += [spec.negative_flag for spec in setting_specs().values() if spec.value_type.flag]
    begun = [each for each in known if len(flag) > 3 and each.startswith(flag)]
    near = begun or difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
    return f"did you mean {near[0]}? the program's own options go after it" if near else "cpulaunch --help lists them"


def parse_command_line(tokens: Sequence[str], *, interpreter: str, torchrun: bool = False) -> CommandLine:
    """What a command line of run or plan says, or one of `torchrun`. Raises: UsageError."""
    reader = _Reader(tokens, abbreviated=torchrun)
    while (token := reader.next_option()) is not None:
        reader.read(token)
    emit = reader.texts.get("--emit")
    if emit is not None and emit not in EMITS:
        raise UsageError(
            "--emit: unknown form", value=repr(emit), source="command line", hint=f"--emit {', '.join(EMITS)}"
        )
    if emit is not None and "--json" in reader.switches:
        raise UsageError("contradicting options", value="--json and --emit", source="command line", hint="drop one")
    return CommandLine(
        values=reader.values,
        program=_program(reader, interpreter),
        switches=frozenset(reader.switches),
        emit=emit,
        sysroot=reader.texts.get("--sysroot"),
        torchrun=torchrun,
    )


def _program(reader: _Reader, interpreter: str) -> Program | None:
    if {"--module", "--no-python"} <= reader.switches and not reader.values.get("run_path"):
        raise UsageError("contradicting options", value="-m and --no-python", source="command line", hint="drop one")
    rest = reader.tokens[reader.position :]
    if not rest:
        return None
    kind: ProgramKind = "script"
    if reader.values.get("run_path"):  # It goes before the others, as in torchrun.
        pass
    elif "--module" in reader.switches:
        kind = "module"
    elif "--no-python" in reader.switches:
        kind = "command"
    return Program(
        kind=kind,
        target=rest[0],
        args=tuple(rest[1:]),
        interpreter="" if kind == "command" else interpreter,
    )
