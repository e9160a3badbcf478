"""Command lines of other launchers: `translate` prints what they are in cpulaunch, ipexrun and run_cpu run them."""

from __future__ import annotations

import shlex

from cpulaunch.cli import terminal
from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.corrections.commands import without_secrets
from cpulaunch.cli.corrections.shell_words import ShellWords, shell_words
from cpulaunch.cli.corrections.translation import translation
from cpulaunch.cli.help.commands import command_named
from cpulaunch.cli.usage import print_command_help
from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COMMAND = command_named("translate")
QUIET = "--quiet-migration"


def run_foreign(
    tool: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    launch: Callable[[Sequence[str], Mapping[str, str]], int],
) -> int:
    """The exit code of `ipexrun` or `run_cpu` with these arguments. Effect: launches what they are in cpulaunch.

    Raises: UsageError for an option that has no counterpart.
    """
    if list(arguments[:1]) in (["-h"], ["--help"]):
        return print_command_help(command_named(tool), environ)
    leading = list(arguments[:1]) == [QUIET]
    quiet: list[str] = []

    def count(flag: str) -> int | None:
        if flag != QUIET:
            return value_count(flag)
        quiet.append(flag)
        return 0

    found = translation([tool, *arguments[leading:]], canonical=canonical, values=count)
    words = list(found.words)
    if quiet:
        words.remove(QUIET)  # The first one is the option: options come before the program.
    if arguments and not (quiet or leading):
        for note in found.notes:
            terminal.notify(note, environ)
        terminal.notify(
            f"{tool}'s options are in cpulaunch: {shlex.join(('cpulaunch', *without_secrets(words)))}", environ
        )
    return launch(["run", *words], environ)


def translate(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of `translate`. Effect: prints the command line. Raises: UsageError if it cannot be translated."""
    if list(arguments[:1]) in (["-h"], ["--help"]):
        return print_command_help(COMMAND, environ)
    arguments = arguments[1:] if list(arguments[:1]) == ["--"] else arguments
    given = shell_words(arguments[0]) if len(arguments) == 1 else ShellWords(tuple(arguments))
    if not given.words:
        raise UsageError("no command line to translate", hint=COMMAND.example)
    found = translation(given.words, canonical=canonical, values=value_count)
    if not found.words:
        raise UsageError("nothing to translate", value=given.words[0], hint=COMMAND.example)
    replaced = tuple(f"{text} is left as it is: replace it, or take it out of the quotes" for text in given.replaced)
    for note in (*found.notes, *replaced):
        terminal.notify(note, environ)
    terminal.print_text(shlex.join(("cpulaunch", *found.words)))
    return 0
