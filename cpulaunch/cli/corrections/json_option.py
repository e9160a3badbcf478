"""Whether a command line that could not be carried out asks for JSON, also where it cannot be parsed."""

from __future__ import annotations

from cpulaunch.cli.corrections.commands import INSPECTION, LAUNCH, SAME
from cpulaunch.cli.corrections.options import typed_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def asks_for_json(
    arguments: Sequence[str], *, canonical: Callable[[str], str], values: Callable[[str], int | None]
) -> bool:
    """Whether --json is among cpulaunch's own options: those of a command, or before the program."""
    command = SAME.get(arguments[0], arguments[0]) if arguments else ""
    if command in INSPECTION:
        return any(word.partition("=")[0] == "--json" for word in arguments)
    tokens = arguments[1:] if command in LAUNCH else arguments
    options = list(typed_options(tokens, canonical=canonical, values=values))
    if any(option.name == "--json" for option in options):
        return True
    rest = tokens[options[-1].end :] if options else tokens
    is_command = bool(rest) and SAME.get(rest[0], rest[0]) in (*INSPECTION, *LAUNCH)
    return is_command and asks_for_json(rest, canonical=canonical, values=values)
