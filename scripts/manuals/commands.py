"""What the completions and the manual say of each command, from the rows that make the help."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from cpulaunch.cli.app import app
from cpulaunch.cli.corrections.foreign_options import Equivalent
from cpulaunch.cli.corrections.launchers import TABLES
from cpulaunch.cli.help.commands import COMMANDS, Command
from cpulaunch.cli.help.measuring import OWN_OPTIONS
from cpulaunch.cli.help.options import Option
from cpulaunch.cli.help.topics import topics
from cpulaunch.cli.translate import QUIET
from cpulaunch.cli.usage import COMPLETIONS, options
from cpulaunch.profile.presets import PRESETS

HELP = Option(shown="--help", short=("-h",), text="show the help", group="Options")
LAUNCHES = tuple(command.name for command in COMMANDS if command.options)
"""Commands that take the options and the program of a launch."""
FOREIGN = tuple(command.name for command in COMMANDS if command.name in TABLES and command.name not in LAUNCHES)
"""Commands that take another launcher's options, and a program."""
SUMMARIES = {command.name: command.summary for command in COMMANDS} | {"help": "show the help on a command or topic"}
"""Every command that may be typed first."""
WORDS_FOR_HELP = tuple(dict.fromkeys((*topics(options()), *(command.name for command in COMMANDS))))
"""What may follow `help`."""
PROFILES = tuple(sorted(preset[0] for preset in PRESETS))
PROFILE_METAVAR = next(option.metavar for option in options() if option.shown == "--profile")


@dataclass(frozen=True, kw_only=True)
class Manual:
    """A command: its words after `cpulaunch`, and what it takes. `values`: the first argument, if it can be listed."""

    words: tuple[str, ...]
    summary: str
    text: str
    usage: str
    options: tuple[Option, ...]
    argument: str = ""
    values: tuple[str, ...] = ()
    example: str = ""

    @property
    def name(self) -> str:
        """The command's name with dashes, as that of its manual page."""
        return "-".join(("cpulaunch", *self.words))


ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "completion": ("words", tuple(COMPLETIONS)),
    "profiles show": ("profile", ()),
    "profiles validate": ("profile file", ()),
    **{name: ("program", ()) for name in (*LAUNCHES, *FOREIGN)},
}
"""Command -> the kind of its argument, and the words that it may be."""


def manuals() -> tuple[Manual, ...]:
    """Every command, subcommands of profiles too, in the order of the help."""
    return tuple(manual for command in COMMANDS for manual in _of_command(command))


def _of_command(command: Command) -> Iterator[Manual]:
    group = typer.main.get_command(app)
    parsed = group.commands.get(command.name)  # type: ignore[attr-defined]
    yield _manual((command.name,), command, _own_options(command, parsed))
    for name, sub in getattr(parsed, "commands", {}).items():
        text = sub.help or ""
        below = Command(
            name=f"{command.name} {name}",
            brief="",
            summary=text[:1].lower() + text[1:].split(":")[0].split(";")[0].rstrip("."),
            usage=" ".join((command.name, name, "[OPTIONS]", *_arguments(sub))),
            text=text,
        )
        yield _manual((command.name, name), below, _options(sub))


def _own_options(command: Command, parsed: Any) -> tuple[Option, ...]:
    if command.name in FOREIGN:
        quiet = Option(shown=QUIET, text="do not say what the options are in cpulaunch", group="Options")
        return (*(_foreign(name, row) for name, row in TABLES[command.name].items()), quiet, HELP)
    if command.name in OWN_OPTIONS:
        return OWN_OPTIONS[command.name]
    return options() if command.options else (HELP,) if parsed is None else _options(parsed)


def _foreign(name: str, row: Equivalent) -> Option:
    """An option of another launcher, explained by what it is in cpulaunch."""
    text = row.remark.format(value="VALUE") or "not needed"
    if row.options:
        text = f"in cpulaunch: {row.options.format(value='VALUE')}"
    return Option(shown=name, metavar="VALUE" if row.values else "", text=text, group="Options")


def _manual(words: tuple[str, ...], command: Command, own: tuple[Option, ...]) -> Manual:
    argument, values = ARGUMENTS.get(" ".join(words), ("", ()))
    return Manual(
        words=words,
        summary=command.summary,
        text=command.text,
        usage=command.usage,
        options=own,
        argument=argument,
        values=values,
        example=command.example,
    )


def _arguments(command: Any) -> Iterator[str]:
    return (parameter.name.upper() for parameter in command.params if parameter.param_type_name == "argument")


def _options(command: Any) -> tuple[Option, ...]:
    """The options of a command that typer parses."""
    rows = [
        Option(shown=each.opts[0], metavar=each.metavar or "", text=each.help, group="Options")
        for each in command.params
        if each.param_type_name == "option"
    ]
    return (*rows, HELP)


def value_kind(option: Option) -> str:
    """What the option's value is: profile, file, directory, words or text; empty without a value."""
    if option.metavar == PROFILE_METAVAR:
        return "profile"
    kinds = {"": "", "FILE": "file", "PATH": "file", "DIR": "directory"}
    return kinds.get(option.metavar, "words" if option.words else "text")
