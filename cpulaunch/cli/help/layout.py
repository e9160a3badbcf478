"""The texts of the help: one screen for a command, all options, and the options of a topic."""

from __future__ import annotations

import textwrap

from cpulaunch.cli.help.commands import COMMANDS, Command
from cpulaunch.cli.help.options import Option
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

USAGE = """\
Usage: cpulaunch [OPTIONS] SCRIPT [ARGS...]
       cpulaunch [OPTIONS] -m MODULE [ARGS...]
       cpulaunch [OPTIONS] --no-python PROGRAM [ARGS...]
       cpulaunch COMMAND ..."""
INTRODUCTION = """\
Run an unmodified PyTorch program on the right cores and memory, and explain every choice. Options for your script go \
after the script name. Each switch has a negative form: --no-smt overrides smt = true in a profile. An option under \
"Distributed" (except --device and --scheduler) makes the launch a job of ranks; PET_* variables are read as by \
torchrun."""
INDENT, SHORT_INDENT, COMMAND_INDENT = 28, 26, 14
TWO_COLUMNS = 80


@record
class Page:
    """How wide a text is, and how its headings are written."""

    width: int
    heading: Callable[[str], str] = str


def short_help(command: Command, options: Sequence[Option], topics: Sequence[str], page: Page) -> str:
    """The help of a command of launches on one screen."""
    by_name = {option.shown: option for option in options}
    lines = [*_usage(command, page)]
    if command.name == "run":
        lines += ["       cpulaunch COMMAND ...", "", page.heading("Commands:"), *_commands_in_columns(page.width)]
    else:
        lines += ["", *textwrap.wrap(command.text, page.width)]
    lines += ["", page.heading("Options:")]
    for name in command.options:
        lines += entry(_short_label(by_name[name]), by_name[name].summary, page.width, indent=SHORT_INDENT)
    footer = f"All options: --help all. Topics: --help {', '.join(topics[1:])}."
    return "\n".join([*lines, "", *textwrap.wrap(footer, page.width)]) + "\n"


def command_help(command: Command, page: Page, options: Sequence[Option] = ()) -> str:
    """The help of a command whose options, if it has any, are not those of a launch."""
    lines = [*_usage(command, page), "", *textwrap.wrap(command.text, page.width)]
    if options:
        lines += ["", *_group(options[0].group, options, page)]
    return "\n".join([*lines, "", page.heading("Example:"), f"  {command.example}"]) + "\n"


def full_help(options: Sequence[Option], page: Page) -> str:
    """The help with all commands and options."""
    usage = USAGE.replace("Usage:", page.heading("Usage:"))
    lines = [usage, "", *textwrap.wrap(INTRODUCTION, min(page.width, 80)), "", page.heading("Commands:")]
    for command in COMMANDS:
        lines += entry(command.name, command.summary, page.width, indent=COMMAND_INDENT)
    for group in dict.fromkeys(option.group for option in options):
        lines += ["", *_group(group, options, page)]
    return "\n".join(lines) + "\n"


def topic_help(group: str, options: Sequence[Option], page: Page) -> str:
    """The options of a group."""
    return "\n".join(_group(group, options, page)) + "\n"


def option_help(option: Option, page: Page) -> str:
    """One option with all its names."""
    names = [f"{name} {option.metavar}".rstrip() for name in option.names]
    label = ", ".join([*names, option.opposite] if option.opposite else names)
    return "\n".join(entry(label, option.text, page.width)) + "\n"


def _usage(command: Command, page: Page) -> Iterator[str]:
    """The lines that say how the command is typed."""
    indent = " " * len("Usage: ")
    line = f"cpulaunch {command.usage}"
    first, *others = textwrap.wrap(
        line, max(page.width, 2 * INDENT), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    yield f"{page.heading('Usage:')} {first.strip()}"
    yield from others


def _group(group: str, options: Sequence[Option], page: Page) -> Iterator[str]:
    yield page.heading(f"{group}:")
    for option in options:
        if option.group == group:
            yield from entry(option.label, option.text, page.width)


def _short_label(option: Option) -> str:
    """The option with its short form and a value of a few characters."""
    names = ", ".join(option.names)
    whole = f"{names} {option.metavar}".rstrip()
    return whole if len(whole) <= SHORT_INDENT - 4 else f"{names} {option.metavar.split('|')[0]}|..."


def _commands_in_columns(width: int) -> Iterator[str]:
    """The commands, in two columns where they fit."""
    cells = [f"  {command.name.ljust(COMMAND_INDENT - 2)}{command.brief}" for command in COMMANDS if command.brief]
    if width < TWO_COLUMNS:
        yield from cells
        return
    half = (len(cells) + 1) // 2
    for row in range(half):
        yield "".join(cell.ljust(TWO_COLUMNS // 2 + 2) for cell in cells[row::half]).rstrip()


def entry(label: str, text: str, width: int, *, indent: int = INDENT) -> Iterable[str]:
    """The lines of one row: the label, and beside or below it the wrapped text."""
    first = f"  {label}"
    if len(first) > indent - 2:
        yield from textwrap.wrap(first, width, subsequent_indent="    ", break_on_hyphens=False) or [first]
        first = ""
    body = [
        line
        for number, part in enumerate(text.split("\n"))
        for line in textwrap.wrap(
            part, max(width - indent, 30), subsequent_indent="   " if number else "", break_on_hyphens=False
        )
    ]
    yield first.ljust(indent) + body[0]
    yield from (" " * indent + line for line in body[1:])
