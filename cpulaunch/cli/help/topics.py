"""What `--help TOPIC` means: everything, a group of options, or one option."""

from __future__ import annotations

import os

from cpulaunch.cli.help.commands import COMMANDS
from cpulaunch.cli.help.options import Option
from cpulaunch.records.errors import NotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = "all"
SIMILAR = 0.7


def topics(options: Sequence[Option]) -> tuple[str, ...]:
    """The names of the topics: all, and of every group of options the last word of its heading."""
    return (ALL, *(_words(group)[-1] for group in _groups(options)))


def _groups(options: Sequence[Option]) -> list[str]:
    return list(dict.fromkeys(option.group for option in options))


def _words(group: str) -> list[str]:
    return [word for word in group.lower().replace(",", "").split() if word not in ("and", "inside")]


def found_group(name: str, options: Sequence[Option]) -> str | None:
    """The group of options of which this is the topic, or another word of the heading; None if there is none."""
    groups = _groups(options)
    by_word = {word: group for group in reversed(groups) for word in _words(group)}
    by_topic = {_words(group)[-1]: group for group in groups}
    return (by_word | by_topic).get(name.lower())


def found_option(name: str, options: Sequence[Option]) -> Option | None:
    """The option of this name, which may be without its dashes and with underscores; None if there is none."""
    bare = name.lstrip("-").replace("_", "-")
    for option in options:
        if bare and bare in [each.lstrip("-") for each in (*option.names, option.opposite)]:
            return option
    return None


def unknown_topic(name: str, options: Sequence[Option]) -> NotFoundError:
    """The error for a word that is no topic, with what was probably meant."""
    names = ", ".join(topics(options))
    guess = None if _is_script(name) else _similar(name, options)
    if _is_script(name):
        hint = f"cpulaunch {name} --help shows the help of the script; the topics are {names}"
    elif guess is not None:
        hint = f"did you mean cpulaunch help {guess}? the topics are {names}"
    else:
        hint = f"the commands are {', '.join(command.name for command in COMMANDS)}; the topics are {names}"
    return NotFoundError(f"no command or topic named {name!r}", hint=hint)


def _is_script(name: str) -> bool:
    return name.endswith(".py") or os.path.isfile(name)


def _similar(name: str, options: Sequence[Option]) -> str | None:
    """The command, topic or option that starts with this text or differs from it by a slip; None if none does."""
    from difflib import get_close_matches

    words = [*(command.name for command in COMMANDS), *topics(options), *(option.shown[2:] for option in options)]
    bare = name.lower().lstrip("-").replace("_", "-")
    starting = [word for word in words if bare and word.startswith(bare)]
    return next(iter(starting or get_close_matches(bare, words, n=1, cutoff=SIMILAR)), None)
