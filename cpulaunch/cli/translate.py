"""The command translate: prints what another launcher's command line is in cpulaunch, and starts nothing."""

from __future__ import annotations

import shlex

from cpulaunch.cli import terminal
from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.corrections.shell_words import ShellWords, shell_words
from cpulaunch.cli.corrections.translation import translation
from cpulaunch.cli.help.commands import command_named
from cpulaunch.cli.usage import print_command_help
from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND = command_named("translate")


def translate(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of `translate`. Effect: prints the command line. Raises: UsageError if it cannot be translated."""
    if list(arguments[:1]) in (["-h"], ["--help"]):
        return print_command_help(COMMAND, environ)
    given = shell_words(arguments[0]) if len(arguments) == 1 else ShellWords(tuple(arguments))
    if not given.words:
        raise UsageError("no command line to translate", hint=COMMAND.example)
    found = translation(given.words, canonical=canonical, values=value_count)
    replaced = tuple(f"{text} is left as it is: replace it, or take it out of the quotes" for text in given.replaced)
    for note in (*found.notes, *replaced):
        terminal.notify(note, environ)
    terminal.print_text(shlex.join(("cpulaunch", *found.words)))
    return 0
