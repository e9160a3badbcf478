"""What a worker tells its launch: one JSON object a line, appended to a file of this worker and its children.

A line is one write to a file opened for appending, so that lines of several processes and threads never mix, and what
was told survives however the process ends. Source: open(2), O_APPEND; POSIX write(2).
"""

from __future__ import annotations

import os

from cpulaunch.records.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def tell(event: str, **facts: Any) -> None:
    """Effect: the launch knows of the event; without a launch that listens, none. Never raises for a full disk."""
    path = os.environ.get(EVENTS_VARIABLE)
    if not path:
        return
    import json

    line = json.dumps({"event": event, "pid": os.getpid(), **facts}, default=str) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return  # The launch is over.
    try:
        os.write(descriptor, line.encode(errors="backslashreplace"))
    except OSError:
        return
    finally:
        os.close(descriptor)


class Figures:
    """One process's figures on their way: at once, but once a second after the first thousand.

    A program may tell one for each step of a long loop, and all are kept on disk until the run is over.
    """

    FREE = 1000
    PAUSE_SECONDS = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pid = os.getpid()
        self._free = self.FREE
        self._next_at = 0.0
        self._waiting: dict[str, float] = {}

    def take(self, name: str, value: float) -> dict[str, float]:
        """What is to be told now. Effect: the figure, if it is not among these, waits."""
        if self._pid != os.getpid():
            self.__init__(self._clock)  # type: ignore[misc]  # A forked child has figures of its own.
        self._waiting[name] = value
        now = self._clock()
        if self._free > 0:
            self._free -= 1
        elif now < self._next_at:
            return {}
        self._next_at = now + self.PAUSE_SECONDS
        return self.rest()

    def rest(self) -> dict[str, float]:
        """The last figures of each name that wait. Effect: none waits."""
        waiting, self._waiting = (self._waiting if self._pid == os.getpid() else {}), {}
        return waiting


_figures: list[Figures] = []


def tell_metric(name: str, value: float) -> None:
    """Effect: the launch has the figure. Raises: TypeError or ValueError, with a launch and without one alike."""
    checked = _checked_name(name), _checked_value(value)
    if not os.environ.get(EVENTS_VARIABLE):
        return
    if not _figures:
        import atexit
        import time

        _figures.append(Figures(time.monotonic))
        atexit.register(_tell_rest)
    _tell_all(_figures[0].take(*checked))


def _tell_rest() -> None:
    _tell_all(_figures[0].rest())


def _tell_all(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        tell("metric", name=name, value=value)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a metric's name is a text, not {type(name).__name__}")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"a metric's name is one line of text, not {name!r}")
    return name.strip()


def _checked_value(value: object) -> float:
    """The number as a float: any that knows how to become one, such as numpy's and torch's scalars."""
    convertible = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if not convertible or isinstance(value, bool):
        raise TypeError(f"a metric's value is a number, not {type(value).__name__}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OverflowError) as error:  # Tensors of several elements; too large an int.
        raise ValueError(f"a metric's value is a number: {error}") from None
    if number != number or abs(number) == float("inf"):
        raise ValueError(f"a metric's value is a finite number, not {number}")
    return number
