"""Writes that torch does not count: its fused optimizer steps leave the version counters of what they change alone.

Autograd then misses that a tensor it has saved is another by now, and a captured graph that its weights are.
Seen with torch 2.13: _fused_adam_ and its like.
"""

from __future__ import annotations

from contextlib import suppress
from functools import wraps

import torch
from torch import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
GRADIENTS = 1
"""Of the lists that these functions take, the one they only read."""

_installed: list[bool] = []


def count_fused_writes() -> None:
    """Effect: from here on fused steps count as writes to parameters and state, as other steps do."""
    if _installed:
        return
    _installed.append(True)
    for name in FUSED:
        if hasattr(torch, name):
            setattr(torch, name, _counting(getattr(torch, name)))


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def counting(*lists: Any, **named: Any) -> Any:
        result = plain(*lists, **named)
        if not torch.compiler.is_compiling():
            _count(lists)
        return result

    return counting


def _count(lists: tuple[Any, ...]) -> None:
    for place, tensors in enumerate(lists):
        if place == GRADIENTS or not isinstance(tensors, list | tuple):
            continue
        try:
            torch.autograd.graph.increment_version(tensors)
        except (TypeError, RuntimeError):
            _count_each(tensors)


def _count_each(tensors: Sequence[Tensor]) -> None:
    """Effect: as `_count`, where older torch takes no list, and stops at inference tensors, which have no counter."""
    for tensor in tensors:
        with suppress(RuntimeError):
            torch.autograd.graph.increment_version(tensor)
