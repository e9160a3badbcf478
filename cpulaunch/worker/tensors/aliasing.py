"""Whether results share memory and objects as eager ones do: with arguments, with each other, with earlier calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.pytree import CONSTANTS, is_plain


def kept_object(eager: object, again: object) -> str:
    """Which object of two results of the same call is not new at each (empty: none), or not a tree.

    A captured call makes all objects of its result anew, one for each place.
    """
    mine, theirs = _objects(eager), _objects(again)
    known = {id(item) for item in mine}
    if len(known) < len(mine):
        return "the same object in two places"
    kept = next((item for item in theirs if id(item) in known), None)
    return "" if kept is None else f"an object of type {type(kept).__name__} that it did not make"


def _objects(value: Any) -> list[object]:
    """The objects in a result that a program can change, besides its tensors."""
    kind = type(value)
    if kind is tuple or kind is list:
        parts = list(value)
    elif kind is dict:
        parts = list(value.values())
    elif kind in pytree.SUPPORTED_NODES:
        parts = list(pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0])
    elif isinstance(value, tuple):
        parts = list(value)
    else:
        parts = list(vars(value).values()) if kind not in CONSTANTS and is_plain(value, kind) else []
        if not parts:
            return []
    own = [] if isinstance(value, tuple) else [value]
    return own + [item for part in parts for item in _objects(part)]


def sharing_differs(
    eager: list[Tensor], graph: list[Tensor], again: list[Tensor], inputs: list[Tensor], frozen: list[Tensor]
) -> str:
    """What a program could notice of the memory of two results of a graph, next to the eager one (empty: nothing)."""
    given, own = _storages(inputs), set(_storages(frozen))
    results = [_storages(tensors) for tensors in (eager, graph, again)]
    if any(own.intersection(result) for result in results):
        return "its own tensors"
    if set(results[1]).intersection(results[2]).difference(given, [0]):
        return "a tensor that does not depend on its arguments"
    if _pattern(given + results[0]) != _pattern(given + results[1]):
        return "tensors that share memory in another way"
    for expected, got in zip(eager, graph, strict=True):
        if expected.requires_grad != got.requires_grad:
            return "a tensor with gradients"
        if _steps(expected) != _steps(got):
            return "a tensor in another memory order"
    return ""


def _storages(tensors: list[Tensor]) -> list[int]:
    return [storage_of(tensor) for tensor in tensors]


def _pattern(storages: list[int]) -> list[int]:
    """Which of them are the same: for each the place of the first; those without memory are like no other."""
    return [storages.index(storage) if storage else -1 for storage in storages]


def _steps(tensor: Tensor) -> list[int]:
    """The strides that matter: of dimensions with more than one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [step for size, step in sizes if size > 1] if tensor.numel() else []
