"""The place of a collective that a callback of a future calls: it must not depend on when the callback runs.

A callback runs at once if its future is complete, else in the thread that completes it, which is different in each
rank. Its collectives come after what was called before the callback was added, and before what was called later. Places
are numbered as sections of a document are: the third callback, added after two calls, has place 3; what it calls, or
adds, has the places 3.1, 3.2 and so on.
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

Place = tuple[int, ...]

_METHODS = ("then", "add_done_callback")
"""The methods of torch._C.Future that torch.futures.Future calls. Source: torch/futures/__init__.py."""

_numbers = itertools.count(1)
_running = threading.local()


class _Callback:
    """A running callback, and how much it has called or added."""

    __slots__ = ("count", "place")

    def __init__(self, place: Place) -> None:
        self.place, self.count = place, 0

    def last(self) -> Place:
        return (*self.place, self.count)

    def next(self) -> Place:
        self.count += 1
        return self.last()


def _running_callback() -> _Callback | None:
    return getattr(_running, "callback", None)


def next_place() -> Place:
    """The place of what is called, or added, now."""
    callback = _running_callback()
    return (next(_numbers),) if callback is None else callback.next()


def _helpers() -> tuple[Callable[[Place | None], bool], ...]:
    found: tuple[Callable[[Place | None], bool], ...] = getattr(_running, "helpers", ())
    return found


@contextmanager
def finishing(run_next: Callable[[Place | None], bool]) -> Iterator[None]:
    """A context in which this thread finishes a work, whose callbacks are not called by one that runs around it.

    A callback that waits for a future runs the works that come before what it calls next: `run_next` runs one, if there
    is one. No others, because these may come later in other ranks.
    """
    around, helpers = _running_callback(), _helpers()
    _running.callback, _running.helpers = None, (*helpers, run_next)
    try:
        yield
    finally:
        _running.callback, _running.helpers = around, helpers


def watch_callbacks() -> None:
    """Effect: the callbacks that Python code adds to any future have a place from now on, and may wait for futures."""
    future: Any = torch._C.Future
    if not hasattr(future.wait, "__wrapped__"):
        future.wait = _helping(future.wait)
        for name in _METHODS:
            setattr(future, name, _placing(getattr(future, name)))


def _helping(plain: Any) -> Any:
    @wraps(plain)
    def wait(future: Any) -> Any:
        callback, helpers = _running_callback(), _helpers()
        before = None if callback is None else (*callback.place, callback.count + 1)
        while helpers and not future.done() and any(run_next(before) for run_next in reversed(helpers)):
            pass  # Nothing comes before later, so then the future depends on other threads.
        return plain(future)

    return wait


def _placing(plain: Any) -> Any:
    @wraps(plain)
    def add(future: Any, callback: Callable[[Any], Any]) -> Any:
        return plain(future, _placed(callback))

    return add


def _placed(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The callback, with the place of one that is added now, or, if another one calls it later, within that one."""
    added = next_place()

    def run(future: Any) -> Any:
        around = _running_callback()
        _running.callback = _Callback(added if around is None or added >= around.last() else around.next())
        try:
            return callback(future)
        finally:
            _running.callback = around

    return run
