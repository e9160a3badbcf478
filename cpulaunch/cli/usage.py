"""The help of run, plan and torchrun, and the command completion."""

from __future__ import annotations

import os
import sys

from cpulaunch.cli import terminal
from cpulaunch.cli.arguments import SHORT, SWITCHES, TEXT_OPTIONS
from cpulaunch.cli.help import layout, pager
from cpulaunch.cli.help.commands import Command, command_named
from cpulaunch.cli.help.measuring import OWN_OPTIONS
from cpulaunch.cli.help.options import Option, option_rows
from cpulaunch.cli.help.topics import ALL, found_group, found_option, topics, unknown_topic
from cpulaunch.records.errors import UsageError
from cpulaunch.records.settings import setting_specs
from cpulaunch.view.text import painter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMPLETIONS = {"bash": "cpulaunch.bash", "zsh": "_cpulaunch", "fish": "cpulaunch.fish"}
"""Shell -> its file in cpulaunch/completions, which scripts/generate-manuals writes."""


def options() -> tuple[Option, ...]:
    """Every option of run, plan and torchrun, in the order of the help."""
    return option_rows(setting_specs().values(), texts=TEXT_OPTIONS, switches=SWITCHES, short=SHORT)


def help_text(topic: str | None, page: layout.Page, *, command: str = "run") -> str:
    """The help on a topic; without one, of a command. Raises: NotFoundError if there is no such topic."""
    rows = options()
    if topic is None:
        return layout.short_help(command_named(command), rows, topics(rows), page)
    if topic == ALL:
        return layout.full_help(rows, page)
    if not topic.startswith("-") and (group := found_group(topic, rows)) is not None:
        return layout.topic_help(group, rows, page)
    if (option := found_option(topic, rows)) is not None:
        return layout.option_help(option, page)
    raise unknown_topic(topic, rows)


def print_help(topic: str | None, environ: Mapping[str, str], *, command: str = "run") -> int:
    """Exit code 0. Effect: shows the help, on a terminal that is smaller than it through a pager."""

    def text(*, color: bool) -> str:
        page = layout.Page(width=terminal.width(), heading=painter("bold", color=color))
        return help_text(topic, page, command=command)

    color = terminal.color(environ)
    whole = text(color=color)
    words = pager.pager_command(environ) if sys.stdout is not None and sys.stdout.isatty() else []
    if words and whole.count("\n") >= terminal.height():
        paged = text(color=color and pager.shows_colors(words, environ))
        if pager.page(paged.encode(sys.stdout.encoding, "replace"), words, environ):
            return 0
    terminal.print_text(whole, end="")
    return 0


def print_command_help(command: Command, environ: Mapping[str, str]) -> int:
    """Exit code 0. Effect: shows the help of a command whose options are not those of a launch."""
    page = layout.Page(width=terminal.width(), heading=painter("bold", color=terminal.color(environ)))
    terminal.print_text(layout.command_help(command, page, OWN_OPTIONS.get(command.name, ())), end="")
    return 0


def print_completion(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of `completion`. Effect: prints the installed file for a shell. Raises: UsageError."""
    command = command_named("completion")
    if list(arguments[:1]) in (["-h"], ["--help"]):
        return print_command_help(command, environ)
    shells = ", ".join(arguments)
    if shells not in COMPLETIONS:
        what = f"no completion for {shells}" if shells else "no shell given"
        raise UsageError(what, hint=f"cpulaunch {command.usage}")
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(folder, "completions", COMPLETIONS[shells]), encoding="utf-8") as file:
        terminal.print_text(file.read(), end="")
    return 0
