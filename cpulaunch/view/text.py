"""Text for a terminal: colours, counts, and lines of whole words.

`rich` is not used here: it folds or crops a path that is longer than a line, and its import takes longer than a plan.
"""

import textwrap
from collections.abc import Callable, Mapping

from cpulaunch.records.errors import escaped

CODES: Mapping[str, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
NARROWEST = 20


def painter(style: str, *, color: bool) -> Callable[[str], str]:
    """A function that gives text a style of CODES; without colour, one that returns the text as it is."""
    return (lambda text: f"\033[{CODES[style]}m{text}\033[0m") if color else str


def wrapped(text: str, width: int, *, head: str = "", indent: int | None = None) -> list[str]:
    """Lines of whole words, at most `width` columns where words allow: paths and commands are never cut.

    The first line begins with `head`; the others are indented by `indent` columns, by default as many as `head` has.
    Control characters, which files of a captured machine may contain, are escaped, except NUL: it joins words.
    """
    indent = len(head) if indent is None else indent
    return textwrap.wrap(
        "\0".join(escaped(" ".join(part.split("\n"))) for part in text.split("\0")),
        max(width, indent + NARROWEST),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
