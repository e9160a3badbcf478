"""Ctrl-C until the supervisor handles signals: it ends this process at once.

KeyboardInterrupt, which Python raises between any two instructions, is no way to end a start-up: Python wraps it where
it creates a class, ignores it where it calls `__del__`, and shows a traceback while modules are imported.
"""

from __future__ import annotations

import os
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]  # See below.

# `signal` itself imports enum and takes as long as planning.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell: 128 and the signal's number."""


def end_at_interrupt() -> None:
    """Effect: from now on Ctrl-C ends this process with exit code 130, unless it is ignored or handled already."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


class interruptible:  # noqa: N801
    """A context in which Ctrl-C raises KeyboardInterrupt: for code that has processes to end before this one ends."""

    def __enter__(self) -> None:
        self._handler = getsignal(SIGINT)
        if self._handler is _end:
            signal(SIGINT, default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is _end:
            signal(SIGINT, _end)
