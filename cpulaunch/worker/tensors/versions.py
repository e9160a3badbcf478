"""Version counters for torch's fused optimizer steps, which change tensors without counting the change.

Without the counter, autograd does not notice that a saved tensor has changed, nor a captured graph that its weights
have. Seen with torch 2.13: _fused_adam_ and the functions in FUSED.
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
"""Index of the only argument of these functions that they do not write to, unless they divide it by `grad_scale`."""

_installed: list[bool] = []


def count_fused_writes() -> None:
    """Effect: from now on fused steps increment the version counters of parameters and state, as other steps do."""
    if _installed:
        return
    _installed.append(True)
    for name in FUSED:
        if hasattr(torch, name):
            setattr(torch, name, _counting(getattr(torch, name)))


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def counting(*lists: Any, **named: Any) -> Any:
        try:
            return plain(*lists, **named)
        finally:  # A step that fails may have written to some.
            if not torch.compiler.is_compiling():
                _count(lists, with_gradients=named.get("grad_scale") is not None)

    counting.__module__, counting.__qualname__ = "torch", plain.__name__  # By which the program pickles it.
    return counting


def _count(lists: tuple[Any, ...], *, with_gradients: bool) -> None:
    for index, tensors in enumerate(lists):
        if (index == GRADIENTS and not with_gradients) or not isinstance(tensors, list | tuple):
            continue
        try:
            torch.autograd.graph.increment_version(tensors)
        except (TypeError, RuntimeError):
            _count_each(tensors)


def _count_each(tensors: Sequence[Tensor]) -> None:
    """Effect: as `_count`, for older torch, which takes no list, and for inference tensors, which have no counter."""
    for tensor in tensors:
        with suppress(RuntimeError):
            torch.autograd.graph.increment_version(tensor)
