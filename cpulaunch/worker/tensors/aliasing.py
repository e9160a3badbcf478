"""Whether captured results share memory and objects as eager ones do: with arguments, one another and other calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.pytree import CONSTANTS, is_plain


def shared_object(first: object, second: object) -> str:
    """Which object occurs twice in the first result of a call, or in both results (empty: none).

    A captured call cannot return such an object: it creates a new object for each place in its result.
    """
    objects = _objects(first)
    ids = {id(item) for item in objects}
    if len(ids) < len(objects):
        return "the same object in two places"
    shared = next((item for item in _objects(second) if id(item) in ids), None)
    return "" if shared is None else f"an object of type {type(shared).__name__} that it did not create"


def _objects(value: Any) -> list[object]:
    """The mutable objects in a result, tensors excluded."""
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


@record
class View:
    """A tensor as a view of another one: `offset` counts elements from the other one's first element."""

    base: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The view of a tensor with the strides that the base had."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def views(inputs: list[Tensor], results: list[Tensor]) -> dict[int, View]:
    """The results that are views of an input or another result, by their positions in both together, as is `base`.

    Of tensors that share memory, the largest one without gaps is the base; one that reaches beyond it is no view.
    Where two inputs share memory, a result may belong to either one, which need not share it in the next call.
    """
    tensors = [*inputs, *results]
    groups: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            groups.setdefault(storage_of(tensor), []).append(position)
    found = {}
    for group in groups.values():
        if len(group) < 2:
            continue
        whole = [position for position in group if tensors[position].numel() == _extent(tensors[position])]
        if not whole or sum(position < len(inputs) for position in group) > 1:
            continue
        base = max(whole, key=lambda position: (tensors[position].numel(), -position))
        for position in group:
            view = _view(tensors[position], tensors[base], base)
            if position not in (base, *range(len(inputs))) and view is not None:
                found[position] = view
    return found


def _view(tensor: Tensor, base: Tensor, position: int) -> View | None:
    offset = tensor.storage_offset() - base.storage_offset()
    if tensor.dtype != base.dtype or offset < 0 or offset + _extent(tensor) > base.numel():
        return None
    return View(base=position, size=tuple(tensor.shape), stride=tensor.stride(), offset=offset)


def _extent(tensor: Tensor) -> int:
    """The number of elements between the first and the last one of a tensor that has elements, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def sharing_differs(
    eager: list[Tensor], graph: list[Tensor], again: list[Tensor], inputs: list[Tensor], frozen: list[Tensor]
) -> str:
    """How the memory of two results of a graph differs noticeably from that of the eager result (empty: not at all)."""
    given, weights = _storages(inputs), set(_storages(frozen))
    results = [_storages(tensors) for tensors in (eager, graph, again)]
    if any(weights.intersection(result) for result in results):
        return "its own tensors"
    if set(results[1]).intersection(results[2]).difference(given, [0]):
        return "a tensor that does not depend on its arguments"
    if _pattern(given + results[0]) != _pattern(given + results[1]):
        return "tensors that share memory differently"
    if _pattern([*map(id, inputs + eager)]) != _pattern([*map(id, inputs + graph)]):
        return "one tensor in place of two"
    for expected, got in zip(eager, graph, strict=True):
        if expected.requires_grad != got.requires_grad:
            return "a tensor with another requires_grad"
        if expected.is_inference() != got.is_inference():
            return "a tensor that was made in inference mode, or was not"
        if _strides(expected) != _strides(got):
            return "a tensor with another memory layout"
    return ""


def _storages(tensors: list[Tensor]) -> list[int]:
    return [storage_of(tensor) for tensor in tensors]


def _pattern(storages: list[int]) -> list[int | None]:
    """For each storage the index of its first occurrence; None for tensors without memory, which share none."""
    return [storages.index(storage) if storage else None for storage in storages]


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions with more than one element; the others have no effect."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if tensor.numel() else []
