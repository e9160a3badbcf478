"""Events that a worker reports to its launch: lines of JSON, appended to one file by the worker and its children.

Each line is one write to a file opened for appending, so that lines of several processes and threads never mix, and
events survive however the process ends. Source: open(2), O_APPEND; POSIX write(2).
"""

from __future__ import annotations

import os
from contextlib import suppress

from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.writing import append

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def report_event(event: str, **facts: Any) -> None:
    """Effect: appends the event to the launch's file; without such a file, none. Never raises for a full disk.

    The launch then sees that an event is lost.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    if not path:
        return
    import json

    line = json.dumps({"event": event, "pid": os.getpid(), **facts}, default=str) + "\n"
    try:
        append(path, line.encode(errors="backslashreplace"))
    except OSError:
        from cpulaunch.system.files.reading import mark_lost

        with suppress(OSError):  # The launch has ended and removed the file.
            mark_lost(path)


class MetricQueue:
    """Metrics or checksums of this process before they are written: the first ones at once, later ones once a second.

    A program may report a metric at each step of a long loop, and events stay on disk until the launch ends.
    """

    FREE = 1000
    PAUSE_SECONDS = 1.0

    def __init__(self, clock: Callable[[], float], *, free: int = FREE) -> None:
        self._clock = clock
        self._free_at_first = free
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._free = self._free_at_first
        self._next_at = 0.0
        self._waiting: dict[str, Any] = {}

    def take(self, name: str, value: Any) -> dict[str, Any]:
        """The metrics to report now. Effect: a metric that is not among them is kept for later."""
        if self._pid != os.getpid():  # A forked child has metrics of its own.
            self._reset()
        self._waiting[name] = value
        now = self._clock()
        if self._free > 0:
            self._free -= 1
        elif now < self._next_at:
            return {}
        self._next_at = now + self.PAUSE_SECONDS
        return self.rest()

    def rest(self) -> dict[str, Any]:
        """The last value of each metric that is kept for later. Effect: empties the queue."""
        waiting, self._waiting = (self._waiting if self._pid == os.getpid() else {}), {}
        return waiting


FREE_CHECKSUMS = 100
"""They are larger than metrics: up to 100 KB each."""
_queues: dict[str, MetricQueue] = {}


def report_metric(name: str, value: float) -> None:
    """Effect: reports the metric to the launch, if any. Raises: TypeError or ValueError, also without a launch."""
    _report_named("metric", checked_name(name, "metric"), _checked_value(value), free=MetricQueue.FREE)


def report_checksum(name: str, value: object) -> None:
    """Effect: reports the outputs' checksum to the launch, if any; the computation is left out without one.

    Raises: TypeError or ValueError.
    """
    checked = checked_name(name, "checksum")
    if not os.environ.get(EVENTS_VARIABLE):
        return
    from cpulaunch.worker.reporting.checksums import checksum_parts

    _report_named("checksum", checked, checksum_parts(value), free=FREE_CHECKSUMS)


def _report_named(event: str, name: str, value: Any, *, free: int) -> None:
    if not os.environ.get(EVENTS_VARIABLE):
        return
    if event not in _queues:
        import atexit
        import time

        _queues[event] = MetricQueue(time.monotonic, free=free)
        atexit.register(_report_rest, event)
    _report_all(event, _queues[event].take(name, value))


def _report_rest(event: str) -> None:
    _report_all(event, _queues[event].rest())


def _report_all(event: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        report_event(event, name=name, value=value)


def checked_name(name: object, kind: str) -> str:
    """The name of a metric or checksum, without spaces around it. Raises: TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {kind} must be a string, not {type(name).__name__}")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"the name of a {kind} must be a single printable line, not {name!r}")
    return name.strip()


def _checked_value(value: object) -> float:
    """The value as a float, of a number or an object that converts to one, such as a scalar of numpy or torch."""
    convertible = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if not convertible or isinstance(value, bool):
        raise TypeError(f"the value of a metric must be a number, not {type(value).__name__}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:  # Tensors with several elements; integers too large for a float.
        raise ValueError(f"the value of a metric must be a number: {error}") from None
    if number != number or abs(number) == float("inf"):
        raise ValueError(f"the value of a metric must be finite, not {number}")
    return number


def text_of(error: BaseException) -> str:
    """What an error says; the name of its class if that is nothing, or if it cannot say it."""
    with suppress(Exception):
        return str(error) or type(error).__name__
    return type(error).__name__
