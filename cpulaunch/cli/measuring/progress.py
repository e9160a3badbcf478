"""One line on stderr that is rewritten, on a terminal only."""

from __future__ import annotations

import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CLEAR = "\r\x1b[K"


class ProgressLine:
    """A line that tells what is going on; nothing where stderr is no terminal, or one that cannot rewrite a line.

    Nor is anything written while the terminal takes nothing, because Ctrl-S or a program has stopped it.
    """

    def __init__(self, environ: Mapping[str, str], *, width: int) -> None:
        self._shown = sys.stderr.isatty() and environ.get("TERM", "dumb") != "dumb"
        self._width = width

    def show(self, text: str) -> None:
        """Effect: the line has this text, cut at the terminal's width."""
        self._write(CLEAR + text[: self._width - 1])

    def clear(self) -> None:
        """Effect: the line is empty."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if not self._shown:
            return
        fd, poll = sys.stderr.fileno(), select.poll()
        poll.register(fd, select.POLLOUT)
        try:
            if poll.poll(0):
                os.write(fd, text.encode(sys.stderr.encoding, "replace"))
        except OSError:
            self._shown = False
