"""Which tensors in a weight's memory are the program's: those that captures make themselves are counted here.

Weights that cpulaunch moves to other memory leave their own to threads that may be reading it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from cpulaunch.worker.tensors.access import is_in_array, is_receiving
from cpulaunch.worker.tensors.foreign import is_foreign
from cpulaunch.worker.tensors.mutation import storage_of

OWNERS = 2
"""Of a weight's storage: the weight, and the Python object with which they are counted."""

_own: dict[int, list[TensorWeakRef]] = {}
"""Address of a storage -> the tensors in it that cpulaunch has made."""
MANY = 1024
_most = [MANY]
"""So many addresses there may be until those without a living tensor are forgotten."""


def own_view(weight: Tensor) -> Tensor:
    """A tensor without gradients in the weight's memory. It is counted as cpulaunch's, not as the program's."""
    return owned(weight.detach())


def owned(view: Tensor) -> Tensor:
    """The tensor, which cpulaunch has made in a weight's memory. Effect: it is counted as cpulaunch's."""
    if len(_own) >= _most[0]:
        _forget_dead()
    living = _living(view)
    if all(reference() is not view for reference in living):
        _own[storage_of(view)] = [*living, TensorWeakRef(view)]
    return view


def _forget_dead() -> None:
    """Effect: storages whose tensors are gone take no memory: a program may compute another bias for each product."""
    for address, views in list(_own.items()):
        if all(view() is None for view in views) and _own.get(address) is views:  # Another thread may add some.
            _own.pop(address, None)
    _most[0] = max(MANY, 2 * len(_own))


def _living(weight: Tensor) -> list[TensorWeakRef]:
    return [reference for reference in _own.get(storage_of(weight), ()) if reference() is not None]


def counts_owners() -> bool:
    """Whether this torch can tell how many tensors hold a weight's memory."""
    return hasattr(torch._C, "_storage_Use_Count")


def is_held_elsewhere(weight: Tensor, *, known: int = 0) -> bool:
    """Whether another tensor or array of the program holds the weight's memory, besides `known` ones, or a collective.

    It is so where this torch cannot tell.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = weight.untyped_storage()  # It counts as long as it exists; with torch 2.13 afterwards, too.
    if count is None or count(storage._cdata) > OWNERS + known + len(_living(weight)):
        return True
    return is_in_array(weight) or is_receiving(weight)


LEFT_SECONDS = 10.0
"""So long the memory is kept that a weight has left."""

_left: list[tuple[float, Tensor]] = []
"""What is in such memory, and since when."""


def move(tensor: Tensor, layout: torch.memory_format) -> None:
    """Effect: the tensor gets the layout, in other memory. Its own is freed later.

    A thread may be reading it of which cpulaunch does not know: it computes gradients, or calls a part of a model.
    On GPUs memory is freed in the order of the kernels.
    """
    old = tensor.detach()
    tensor.data = old.contiguous(memory_format=layout)
    if tensor.is_cpu and tensor.data_ptr() != old.data_ptr():
        _left.append((time.monotonic(), old))


def free_left_memory() -> None:
    """Effect: frees what weights have left long enough ago."""
    if _left:
        end = time.monotonic() - LEFT_SECONDS
        while _left[:1] and _left[0][0] < end:
            del _left[:1]


def reorder(weights: list[Tensor], layout: torch.memory_format) -> None:
    """Effect: the weights get the layout. In inference mode they would become inference tensors, which cannot train."""
    for weight in weights:
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            move(weight, layout)
            if weight.grad is not None:
                move(weight.grad, layout)


def may_move(weight: Tensor) -> bool:
    """Whether a weight is on the CPU, in torch's own layout, and nothing else holds its memory.

    On a GPU, a CUDA graph or a kernel of another stream may still read the memory that a weight has left.
    """
    return weight.is_cpu and weight.is_contiguous() and is_own(weight)


def is_own(weight: Tensor) -> bool:
    """Whether nothing else holds the memory of a weight, nor that of its gradient: it may be part of a flat buffer."""
    tensors = [weight] if weight.grad is None else [weight, weight.grad]
    return type(weight) is nn.Parameter and not any(map(is_in_use, tensors))


def is_in_use(tensor: Tensor) -> bool:
    """Whether other processes, another library or other tensors of the program hold the tensor's memory."""
    is_shared = tensor.is_cpu and tensor.is_shared()  # On a GPU, torch says so of every tensor.
    return is_shared or is_foreign(tensor) or is_held_elsewhere(tensor)
