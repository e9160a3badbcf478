"""The place of a collective that a callback of a future calls: it must not depend on when the callback runs.

A callback runs at once if its future is complete, else in the thread that completes it, which is different in each
rank. Its collectives come after what was called before the callback was added, and before what was called later. Places
are numbered as sections of a document are: the third callback, added after two calls, has place 3; what it calls, or
adds, has the places 3.1, 3.2 and so on.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch

Place = tuple[int, ...]


class Position:
    """The place of a work, and that of the first callback of its future; None if there is none."""

    __slots__ = ("first_callback", "place")

    def __init__(self) -> None:
        self.place: Place = ()
        self.first_callback: Place | None = None


RunNext = Callable[[Place | None, tuple[Position, ...]], bool]
UNKNOWN = Position()
"""Stands for what completes a future that is not one of a work, which may be the callback of any work."""

_numbers = itertools.count(1)
positions: WeakKeyDictionary[Any, tuple[Position, ...]] = WeakKeyDictionary()
"""Futures of works, and those made from them -> the works' positions."""


class _Callback:
    """A running callback, and how much it has called or added."""

    __slots__ = ("count", "place")

    def __init__(self, place: Place) -> None:
        self.place, self.count = place, 0

    def at(self, number: int) -> Place:
        """The place of what it called last (0), or calls next (1)."""
        return (*self.place, self.count + number)


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
    return callback.at(0)


def comes_later(position: Position) -> bool:
    """Whether the callbacks of a work come after the running callback, which has not called the work itself."""
    callback, first = _running.callback, position.first_callback
    if callback is None or callback.place < position.place < callback.at(1):
        return False
    return first is None or first > callback.at(1)


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
    if not hasattr(torch_c.Future.wait, "__wrapped__"):
        _replace(torch_c.Future, "wait", _wait)
        _replace(torch_c, "_collect_all", _collect)
        for name in (
            "then",
            "add_done_callback",
        ):  # Which torch.futures.Future calls. Source: torch/futures/__init__.py.
            _replace(torch_c.Future, name, _add)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Effect: the function replaces a function of torch's, which it gets as its first argument."""
    plain = getattr(owner, name)
    setattr(owner, name, wraps(plain)(lambda *arguments: function(plain, *arguments)))


def _wait(plain: Any, future: Any) -> Any:
    helpers, callback = _running.helpers, _running.callback
    before = None if callback is None else callback.at(1)
    needed = positions.get(future, (UNKNOWN,))
    while helpers and not future.done() and any(run_next(before, needed) for run_next in reversed(helpers)):
        pass  # Nothing comes before later, so then the future depends on other threads.
    return plain(future)


def _add(plain: Any, future: Any, callback: Callable[[Any], Any]) -> Any:
    added, works = next_place(), positions.get(future, ())
    for work in works:
        work.first_callback = min(work.first_callback or added, added)
    derived = plain(future, _placed(callback, added))
    if derived is not None and works:
        positions[derived] = works
    return derived


def _collect(plain: Any, futures: list[Any]) -> Any:
    collected = plain(futures)
    positions[collected] = tuple(work for each in futures for work in positions.get(each, (UNKNOWN,)))
    return collected


def _placed(callback: Callable[[Any], Any], added: Place) -> Callable[[Any], Any]:
    """The callback, at the place `added`, unless other code than that which finishes a work calls it: then as of now.

    A callback of a future that the program completes itself comes where the program does that.
    """

    def run(future: Any) -> Any:
        around = _running.callback
        keeps_place = bool(_running.helpers) if around is None else added >= around.at(0)
        _running.callback = _Callback(added if keeps_place else next_place())
        try:
            return callback(future)
        finally:
            _running.callback = around

    return run
