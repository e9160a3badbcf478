"""Weak references to tensors of the program that do not keep torch from swapping them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

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
    """Effect: torch.utils.swap_tensors, which refuses tensors with weak references, drops those of `at_end` first.

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
        plain(t1, t2)

    torch.utils.swap_tensors = swap_tensors
