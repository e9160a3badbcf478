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
from weakref import WeakKeyDictionary

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    RunNext = Callable[["Place | None", "tuple[Position, ...]"], bool]

Place = tuple[int, ...]


class Position:
    """The place of a work, and that of the first callback of its future; None if there is none."""

    __slots__ = ("first_callback", "place")

    def __init__(self) -> None:
        self.place: Place = ()
        self.first_callback: Place | None = None


UNKNOWN = Position()
"""Stands for what completes a future that is not one of a work, which may be the callback of any work."""

_METHODS = ("then", "add_done_callback")
"""The methods of torch._C.Future that torch.futures.Future calls. Source: torch/futures/__init__.py."""

_numbers = itertools.count(1)
positions: WeakKeyDictionary[Any, tuple[Position, ...]] = WeakKeyDictionary()
"""Futures of works, and those made from them -> the works' positions."""


class _Callback:
    """A running callback, and how much it has called or added."""

    __slots__ = ("count", "place")

    def __init__(self, place: Place) -> None:
        self.place, self.count = place, 0

    def last(self) -> Place:
        return (*self.place, self.count)

    def upcoming(self) -> Place:
        return (*self.place, self.count + 1)


class _Running(threading.local):
    """What this thread runs: a callback, within the `finishing` contexts of `helpers`."""

    callback: _Callback | None = None
    helpers: tuple[RunNext, ...] = ()


_running = _Running()


def next_place() -> Place:
    """The place of what is called, or added, now."""
    callback = _running.callback
    if callback is None:
        return (next(_numbers),)
    callback.count += 1
    return callback.last()


def comes_later(position: Position) -> bool:
    """Whether the callbacks of a work come after the running callback, which has not called the work itself."""
    callback, first = _running.callback, position.first_callback
    if callback is None or callback.place < position.place < callback.upcoming():
        return False
    return first is None or first > callback.upcoming()


@contextmanager
def finishing(run_next: RunNext) -> Iterator[None]:
    """A context in which this thread finishes a work, whose callbacks are not called by one that runs around it.

    A callback that waits for a future runs the works that come before what it calls next, and those that the future
    needs: `run_next` runs one, if there is one. No others, because these may come later in other ranks.
    """
    around, helpers = _running.callback, _running.helpers
    _running.callback, _running.helpers = None, (*helpers, run_next)
    try:
        yield
    finally:
        _running.callback, _running.helpers = around, helpers


def watch_callbacks() -> None:
    """Effect: the callbacks that Python code adds to any future have a place from now on, and may wait for futures."""
    torch_c: Any = torch._C
    future = torch_c.Future
    if not hasattr(future.wait, "__wrapped__"):
        future.wait = _helping(future.wait)
        torch_c._collect_all = _collecting(torch_c._collect_all)
        for name in _METHODS:
            setattr(future, name, _placing(getattr(future, name)))


def _helping(plain: Any) -> Any:
    @wraps(plain)
    def wait(future: Any) -> Any:
        helpers, callback = _running.helpers, _running.callback
        before = None if callback is None else callback.upcoming()
        needed = positions.get(future, (UNKNOWN,))
        while helpers and not future.done() and any(run_next(before, needed) for run_next in reversed(helpers)):
            pass  # Nothing comes before later, so then the future depends on other threads.
        return plain(future)

    return wait


def _placing(plain: Any) -> Any:
    @wraps(plain)
    def add(future: Any, callback: Callable[[Any], Any]) -> Any:
        added, works = next_place(), positions.get(future, ())
        for work in works:
            work.first_callback = min(work.first_callback or added, added)
        derived = plain(future, _placed(callback, added))
        if derived is not None and works:
            positions[derived] = works
        return derived

    return add


def _collecting(plain: Any) -> Any:
    @wraps(plain)
    def collect(futures: list[Any]) -> Any:
        collected = plain(futures)
        positions[collected] = tuple(work for each in futures for work in positions.get(each, (UNKNOWN,)))
        return collected

    return collect


def _placed(callback: Callable[[Any], Any], added: Place) -> Callable[[Any], Any]:
    """The callback, at the place `added`, unless other code than that which finishes a work calls it: then as of now.

    A callback of a future that the program completes itself comes where the program does that.
    """

    def run(future: Any) -> Any:
        around = _running.callback
        keeps_place = bool(_running.helpers) if around is None else added >= around.last()
        _running.callback = _Callback(added if keeps_place else next_place())
        try:
            return callback(future)
        finally:
            _running.callback = around

    return run
