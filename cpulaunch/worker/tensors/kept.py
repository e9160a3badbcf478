"""Whether a call leaves tensors behind, other than its result: in a module, in an argument, or in a list of a hook."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from typing import Any

from torch import Tensor

from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten

_lock = threading.RLock()
"""Lists of one thread's search would be holders in that of another."""


def _renew_lock() -> None:
    """Effect: releases the lock in a forked child, where another thread's hold on it would last forever."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class KeptTensors:
    """The tensors alive before a call, as far as they are young; `found` says after it whether more of them are.

    Only objects are looked at that survived at most one collection of Python's garbage: there are few of them. While
    other threads run, whose calls have tensors too, only tensors in dicts, lists and sets count.
    """

    def __init__(self) -> None:
        with _lock:
            self._before = _young_tensors()  # Kept alive, so that no other tensor gets the address of one of them.

    def found(self, result: Any, arguments: Any) -> bool:
        """Whether the call has left tensors behind that are not only in its result."""
        with _lock:
            own = _ids(result) - _ids(arguments)
            bases = {id(tensor._base) for tensor in _tensors(result)}  # What a view in the result is a view of.
            known = {*map(id, self._before), *own, *bases}
            kept = tuple([tensor for tensor in _young_tensors() if id(tensor) not in known])
            self._before = ()
            if not kept or threading.active_count() == 1:
                return bool(kept)
            return any(isinstance(holder, dict | list | set) for holder in gc.get_referrers(*kept))


def _young_tensors() -> tuple[Tensor, ...]:
    """The tensors in a tuple, which is no holder of the program's."""
    return tuple([item for age in (0, 1) for item in gc.get_objects(age) if type(item) is Tensor])


def _ids(value: Any) -> set[int]:
    return set(map(id, _tensors(value)))


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    with suppress(UnknownStructureError):
        flatten(value, tensors)
    return tensors
