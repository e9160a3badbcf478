"""Weak references to objects of the program: by identity, and without keeping torch from swapping tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_references: dict[int, tuple[weakref.ref[Tensor], list[Callable[[], object]]]] = {}
"""By address, the tensors that are referred to, and what to call when they end."""

_installed: list[bool] = []


def at_end(tensor: Tensor, end: Callable[[], object]) -> None:
    """Effect: `end` is called once, when the tensor no longer exists, or before it gets another one's contents."""
    allow_swaps()
    key = id(tensor)
    if key not in _references:
        _references[key] = (weakref.ref(tensor, lambda _: _end(key)), [])
    _references[key][1].append(end)


def _end(key: int) -> None:
    _, ends = _references.pop(key, (None, ()))
    for end in ends:
        end()


def allow_swaps() -> None:
    """Effect: torch.utils.swap_tensors, which refuses tensors with weak references, drops those of the plugin first.

    Modules call it in `to` and `load_state_dict` under torch.__future__.set_swap_module_params_on_conversion(True).
    """
    if _installed or not hasattr(torch.utils, "swap_tensors"):
        return
    _installed.append(True)
    plain: Any = torch.utils.swap_tensors

    @wraps(plain)
    def swap_tensors(t1: Any, t2: Any) -> None:
        _end(id(t1))
        _end(id(t2))
        if weakref.getweakrefs(t1) or weakref.getweakrefs(t2):
            gc.collect()  # What traced a graph refers to them from cycles.
        plain(t1, t2)

    torch.utils.swap_tensors = swap_tensors


Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """What is known of some objects: it keeps none of them alive, and ends with them.

    They are told apart by identity: a program may compare its modules by value, or not let them be compared.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: object) -> Value | None:
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __setitem__(self, key: object, value: Value) -> None:
        number, entries = id(key), self._entries
        entry = entries.get(number)
        reference = weakref.ref(key, lambda _: entries.pop(number, None)) if entry is None else entry[0]
        entries[number] = (reference, value)

    def setdefault(self, key: object, value: Value) -> Value:
        """What is known of the object, or else `value`, which is then known. Other threads may call this meanwhile."""
        number, entries = id(key), self._entries
        return entries.setdefault(number, (weakref.ref(key, lambda _: entries.pop(number, None)), value))[1]

    def items(self) -> list[tuple[Any, Value]]:
        """The objects that still exist, and what is known of them."""
        found = [(reference(), value) for reference, value in list(self._entries.values())]
        return [(key, value) for key, value in found if key is not None]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def discard(self, key: object) -> None:
        self._entries.pop(id(key), None)
