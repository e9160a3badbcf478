"""The place of a collective that a callback of a future calls: it must not depend on when the callback runs.

A callback runs at once if its future is complete, else in the thread that completes it, which is different in each
rank. Its collectives come after those that were submitted before the callback was added, and before all others. A
callback that runs within another one, or is added by it, comes after what that one has called so far.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from functools import wraps

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_METHODS = ("then", "add_done_callback")
"""The methods of torch._C.Future that torch.futures.Future calls. Source: torch/futures/__init__.py."""

Place = tuple[int, int]
"""The number of the last collective submitted before, then the number of the callback; 0 for the collective itself."""

_lock = threading.Lock()
_added = itertools.count(1)
_submissions = [0]
_running = threading.local()


def submitted() -> Place:
    """The place of a collective that is submitted now."""
    with _lock:
        _submissions[0] += 1
        return _submissions[0], 0


def callback_place() -> Place | None:
    """The place of collectives that the running callback calls; None outside callbacks."""
    return getattr(_running, "place", None)


def set_callback_place(place: Place | None) -> None:
    """Effect: the running callback continues at this place."""
    _running.place = place


def is_finishing() -> bool:
    """Whether this thread finishes a work, in which callbacks run."""
    return getattr(_running, "finishing", False)


@contextmanager
def finishing() -> Iterator[None]:
    """A context in which this thread finishes a work, perhaps within a callback, whose place is not that of others."""
    place, was = callback_place(), is_finishing()
    _running.place, _running.finishing = None, True
    try:
        yield
    finally:
        _running.place, _running.finishing = place, was


def watch_callbacks() -> None:
    """Effect: the callbacks that Python code adds to any future have a place from now on."""
    for name in _METHODS:
        plain = getattr(torch._C.Future, name)
        if not hasattr(plain, "__wrapped__"):
            setattr(torch._C.Future, name, _placing(plain))


def _placing(plain: Any) -> Any:
    @wraps(plain)
    def add(future: Any, callback: Callable[[Any], Any]) -> Any:
        return plain(future, _placed(callback))

    return add


def _placed(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The callback, with the place of one that is added now."""
    around = callback_place()
    place = (_submissions[0] if around is None else around[0], next(_added))

    def run(future: Any) -> Any:
        outer = callback_place()
        _running.place = place if outer is None else max(outer, place)
        try:
            return callback(future)
        finally:
            _running.place = None if outer is None else max(outer, _running.place)

    return run
