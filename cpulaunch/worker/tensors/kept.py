"""Whether a call leaves tensors behind, other than its result: in a module, in an argument, or in a list of a hook."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from typing import Any

from torch import Tensor

from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten


class KeptTensors:
    """The tensors alive before a call, as far as they are young; `found` says after it whether more of them are.

    Only objects are looked at that survived at most one collection of Python's garbage: there are few of them. While
    other threads run, whose calls have tensors too, only tensors in dicts, lists and sets count.
    """

    def __init__(self) -> None:
        self._before = _young_tensors()  # Kept alive, so that no other tensor gets the address of one of them.

    def found(self, result: Any, arguments: Any) -> bool:
        """Whether the call has left tensors behind that are not only in its result."""
        own = _ids(result) - _ids(arguments)
        bases = {id(tensor._base) for tensor in _tensors(result)}  # What a view in the result is a view of.
        known = {*map(id, self._before), *own, *bases}
        kept = [tensor for tensor in _young_tensors() if id(tensor) not in known]
        self._before = []
        if not kept or threading.active_count() == 1:
            return bool(kept)
        return any(isinstance(holder, dict | list | set) and holder is not kept for holder in gc.get_referrers(*kept))


def _young_tensors() -> list[Tensor]:
    return [item for age in (0, 1) for item in gc.get_objects(age) if type(item) is Tensor]


def _ids(value: Any) -> set[int]:
    return set(map(id, _tensors(value)))


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    with suppress(UnknownStructureError):
        flatten(value, tensors)
    return tensors
