"""Arguments and results taken apart into tensors and the rest, and results put together again."""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, range, slice, type(...)),
)
"""Types whose values never change and hold no tensor."""

TAGS = ("tensor", "constant", "dict", "named tuple", "node", "object")
MAX_DEPTH = 32

HEAP_TYPE = 1 << 9
"""Set for classes written in Python. Source: CPython, Include/object.h, Py_TPFLAGS_HEAPTYPE."""

Spec: TypeAlias = "tuple[Any, ...]"
"""What is left when the tensors are taken out: nested tuples that begin with how to put them together."""


class UnknownStructureError(Exception):
    """An object that cannot be taken apart; the message names its type."""


def flatten(value: Any, tensors: list[Tensor], *, depth: int = 0) -> Spec:
    """What `value` is besides its tensors. Effect: these are appended to `tensors`, in a fixed order.

    Equal specs mean equal structure and equal constants. Raises: UnknownStructureError.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        return ("tensor",)
    if kind in CONSTANTS or isinstance(value, enum.Enum):
        return ("constant", kind, _comparable(value))
    if depth > MAX_DEPTH:
        raise UnknownStructureError("nested too deeply")
    if kind is dict:
        return ("dict", *_entries(value, tensors, depth))
    if kind is tuple or kind is list:
        return (kind, *[flatten(item, tensors, depth=depth + 1) for item in value])
    return _take_registered(value, kind, tensors, depth)


def _comparable(value: object) -> object:
    """The constant such that equal means the same: not 0.0 for -0.0, and NaN equal to itself."""
    return repr(value) if isinstance(value, float | complex) else value


def _entries(mapping: dict[Any, Any], tensors: list[Tensor], depth: int) -> list[tuple[Any, Spec]]:
    for key in mapping:
        if type(key) not in CONSTANTS:
            raise UnknownStructureError(f"a dict with a key of type {type(key).__name__}")
    return [(key, flatten(item, tensors, depth=depth + 1)) for key, item in mapping.items()]


def _take_registered(value: Any, kind: type, tensors: list[Tensor], depth: int) -> Spec:
    """Types torch's pytree knows (transformers registers its outputs there), dataclasses, and plain objects."""
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None and pytree.is_namedtuple_class(kind):
        return ("named tuple", kind, *[flatten(item, tensors, depth=depth + 1) for item in value])
    if node is not None:
        children, context = node.flatten_fn(value)
        return ("node", kind, context, *[flatten(item, tensors, depth=depth + 1) for item in children])
    if is_plain(value, kind):
        return ("object", kind, *_entries(vars(value), tensors, depth))
    raise UnknownStructureError(f"an object of type {kind.__name__}")


def is_plain(value: object, kind: type) -> bool:
    """Whether the object is nothing but its attributes: made by a Python class without slots or a C base."""
    if (
        isinstance(value, torch.nn.Module | Tensor | type | enum.Enum)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    bases = [base for base in kind.__mro__ if base is not object]
    return all(base.__flags__ & HEAP_TYPE and not vars(base).get("__slots__") for base in bases)


def skeleton(spec: Spec) -> Spec:
    """The structure without the values of its constants."""
    if spec[0] == "constant":
        return ("constant",)
    return tuple(skeleton(part) if _is_spec(part) else _keyed(part) for part in spec)


def _is_spec(part: object) -> bool:
    return isinstance(part, tuple) and bool(part) and (part[0] in TAGS or part[0] in (tuple, list))


def _keyed(part: object) -> object:
    """An entry of a dict or an object: its key and the skeleton of its value; anything else as it is."""
    if isinstance(part, tuple) and len(part) == 2 and _is_spec(part[1]):
        return (part[0], skeleton(part[1]))
    return part


def unflatten(spec: Spec, tensors: list[Any]) -> Any:
    """The value whose tensors are the next of `tensors`, in order. Effect: takes them from its end (reversed)."""
    tag = spec[0]
    if tag == "tensor":
        return tensors.pop()
    if tag == "constant":
        return _constant(spec)
    if tag == "dict":
        return {key: unflatten(item, tensors) for key, item in spec[1:]}
    if tag is tuple or tag is list:
        return tag(unflatten(item, tensors) for item in spec[1:])
    if tag == "named tuple":
        return spec[1](*[unflatten(item, tensors) for item in spec[2:]])
    if tag == "node":
        children = [unflatten(item, tensors) for item in spec[3:]]
        return pytree.SUPPORTED_NODES[spec[1]].unflatten_fn(children, spec[2])
    made = object.__new__(spec[1])
    vars(made).update((key, unflatten(item, tensors)) for key, item in spec[2:])
    return made


def _constant(spec: Spec) -> object:
    _, kind, value = spec
    return kind(value) if kind in (float, complex) else value


def rebuild(spec: Spec, tensors: list[Any]) -> Any:
    """The value made of a spec and its tensors, in the order in which they were taken."""
    return unflatten(spec, tensors[::-1])


def key_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What `key_of` says, for calls with nothing but plain tensors by position; None for any other."""
    if kwargs or not all(type(value) is Tensor for value in args):
        return None
    try:
        return tuple([(tensor.shape, tensor.dtype, tensor.stride(), tensor.is_cpu) for tensor in args])
    except (RuntimeError, NotImplementedError):  # Sparse and nested tensors have no strides.
        return None


def key_of(spec: Spec, tensors: list[Tensor]) -> tuple[Any, ...] | None:
    """What two calls have in common that may share a capture; None if it cannot be compared."""
    try:
        shapes = tuple((tensor.shape, tensor.dtype, tensor.stride(), tensor.device.type) for tensor in tensors)
        key = (spec, shapes)
        hash(key)
    except (TypeError, RuntimeError, NotImplementedError):  # RuntimeError: sparse and nested tensors have no strides.
        return None
    return key


def words(tensors: list[Tensor]) -> str:
    """Shapes and types for a person: "float32[1, 128, 768], int64[1, 128]"."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
