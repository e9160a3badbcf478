"""Which tensors in a weight's memory are the program's: those that captures make themselves are counted here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from cpulaunch.worker.tensors.mutation import storage_of

OWNERS = 2
"""Of a weight's storage: the weight, and the Python object with which they are counted."""

_own: dict[int, list[TensorWeakRef]] = {}
"""Address of a storage -> the tensors in it that cpulaunch has made. Captures are limited, and so are these."""


def own_view(weight: Tensor) -> Tensor:
    """A tensor without gradients in the weight's memory. It is counted as cpulaunch's, not as the program's."""
    view = weight.detach()
    _own[storage_of(weight)] = [*_living(weight), TensorWeakRef(view)]
    return view


def _living(weight: Tensor) -> list[TensorWeakRef]:
    return [reference for reference in _own.get(storage_of(weight), ()) if reference() is not None]


def is_held_elsewhere(weight: Tensor) -> bool:
    """Whether another tensor or array of the program holds the weight's memory, as far as this torch can tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = weight.untyped_storage()  # It counts as long as it exists; with torch 2.13 afterwards, too.
    return count is None or count(storage._cdata) > OWNERS + len(_living(weight))
