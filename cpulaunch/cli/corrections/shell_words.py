"""The words of a quoted command line, and what a shell would have done with it besides."""

from __future__ import annotations

import re

from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OPERATORS = ";|&<>()\n#"
"""Characters that end a command, redirect it or begin a comment. Source: POSIX.1-2024, Shell Command Language, 2."""
EXPANSION = re.compile(r"\$[\w{(@*#?!-]|`")
PATTERN = re.compile(r"[*?\[]|\{[^}]*[,.][^}]*\}|~")
AT_START = "#~"
"""Characters that mean something to a shell at the start of a word only."""


@record(kw_only=False)
class ShellWords:
    """The words of a command; and the texts among them that a shell replaces before it runs the command."""

    words: tuple[str, ...]
    replaced: tuple[str, ...] = ()


def shell_words(text: str) -> ShellWords:
    """The words of one command. Raises: UsageError for several commands, redirections, or a quote that is not closed.

    A backslash at the end of a line joins it with the next one.
    """
    import shlex

    text = text.replace("\\\n", " ").strip()
    replaced = []
    for position, quote in _unescaped(text):
        starts = text[position] not in AT_START or position == 0 or text[position - 1].isspace()
        if not quote and starts and text[position] in OPERATORS:
            shown = "a second line" if text[position] == "\n" else text[position:].split("\n")[0]
            hint = "give one command, without redirections"
            raise UsageError("what only a shell can do cannot be translated", value=shown, hint=hint)
        found = EXPANSION.match(text, position)
        if found is None and not quote and starts:
            found = PATTERN.match(text, position)
        if found is not None:
            replaced.append(_word_at(text, position))
    try:
        return ShellWords(tuple(shlex.split(text)), tuple(dict.fromkeys(replaced)))
    except ValueError as error:
        raise UsageError("not a command line", value=error, hint="close the quote") from None


def _unescaped(text: str) -> Iterator[tuple[int, str]]:
    """The positions of characters that a shell may read as its own, each with the quote around it, if any."""
    quote, escaped = "", False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif character == quote:
            quote = ""
        elif character in "'\"" and not quote:
            quote = character
        elif quote != "'":
            yield position, quote


def _word_at(text: str, position: int) -> str:
    """The part of the text around this position up to white space."""
    start = max(text.rfind(space, 0, position) for space in " \t\n") + 1
    return text[start:].split()[0]
