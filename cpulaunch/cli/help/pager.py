"""Long text on a terminal goes through a pager, as with git: PAGER, else less; LESS is FRX unless it is set."""

from __future__ import annotations

import os
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULTS = {"LESS": "FRX", "LV": "-c"}
"""less: end if the text fits on the screen, show colours, leave the text on the screen. Source: git, pager.c."""

SHELL_SIGNS = frozenset("|&;<>()$`\\\"'*?[#~=%\n")
"""Where PAGER has one of these, a shell runs it. Source: git, run-command.c."""


def pager_command(environ: Mapping[str, str]) -> list[str]:
    """The words of the pager; empty if the user wants none, or the terminal cannot show one."""
    if environ.get("TERM", "dumb") == "dumb":
        return []
    text = environ.get("PAGER", "less").strip()
    if not SHELL_SIGNS.isdisjoint(text):
        return ["sh", "-c", text]
    return [] if text == "cat" else text.split()


def shows_colors(command: list[str], environ: Mapping[str, str]) -> bool:
    """Whether this pager passes colours on to the terminal."""
    name = os.path.basename(command[0]) if command else ""
    return name == "less" and "r" in environ.get("LESS", DEFAULTS["LESS"]).lower()


def page(text: bytes, command: list[str], environ: Mapping[str, str]) -> bool:
    """Whether the pager has shown the text: not if it is missing, or has failed. Effect: waits for its end.

    A pager that a signal ended, such as Ctrl-C, has shown what the user wanted to see.
    """
    import signal

    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=DEFAULTS | dict(environ))
    except OSError:
        return False
    earlier = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the pager's; it does not end it.
    try:
        process.communicate(text)
    finally:
        signal.signal(signal.SIGINT, earlier)
    return process.returncode <= 0
