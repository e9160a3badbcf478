"""What a worker tells its launch: one JSON object a line, appended to a file of this worker and its children.

A line is one write to a file opened for appending, so that lines of several processes and threads never mix, and what
was told survives however the process ends. Source: open(2), O_APPEND; POSIX write(2).
"""

from __future__ import annotations

import os

from cpulaunch.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
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


def tell_metric(name: str, value: float) -> None:
    """Effect: the launch has the figure. Raises: TypeError or ValueError, with a launch and without one alike."""
    checked = _checked_name(name), _checked_value(value)
    tell("metric", name=checked[0], value=checked[1])


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
