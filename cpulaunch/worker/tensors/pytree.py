"""Arguments and results flattened into their tensors and a structure, and results rebuilt from these."""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, range, slice, type(...)),
)
"""Types whose values are immutable and contain no tensors."""

TAGS = ("tensor", "constant", "dict", "named tuple", "node", "object")
MAX_DEPTH = 32

HEAP_TYPE = 1 << 9
"""Set for classes written in Python. Source: CPython, Include/object.h, Py_TPFLAGS_HEAPTYPE."""

Spec: TypeAlias = "tuple[Any, ...]"
"""The structure of a value without its tensors: nested tuples, each beginning with a tag for rebuilding it."""


class UnknownStructureError(Exception):
    """An object that cannot be flattened; the message names its type."""


def flatten(value: Any, tensors: list[Tensor], *, depth: int = 0) -> Spec:
    """The structure of a value, with its constants. Effect: appends the value's tensors to `tensors`, in a fixed order.

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
        return ("dict", *_flatten_entries(value, tensors, depth))
    if kind is tuple or kind is list:
        return (kind, *[flatten(item, tensors, depth=depth + 1) for item in value])
    return _flatten_registered(value, kind, tensors, depth)


def _comparable(value: object) -> object:
    """The constant in a form where == means identical: 0.0 and -0.0 differ, and NaN equals itself."""
    return repr(value) if isinstance(value, float | complex) else value


def _flatten_entries(mapping: dict[Any, Any], tensors: list[Tensor], depth: int) -> list[tuple[Any, Spec]]:
    for key in mapping:
        if type(key) not in CONSTANTS:
            raise UnknownStructureError(f"a dict with a key of type {type(key).__name__}")
    return [(key, flatten(item, tensors, depth=depth + 1)) for key, item in mapping.items()]


def _flatten_registered(value: Any, kind: type, tensors: list[Tensor], depth: int) -> Spec:
    """The structure of a named tuple, a plain object, or a type registered in torch's pytree (as by transformers)."""
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None and _is_named_tuple(kind):
        return ("named tuple", kind, *[flatten(item, tensors, depth=depth + 1) for item in value])
    if node is not None:
        children, context = node.flatten_fn(value)
        return ("node", kind, context, *[flatten(item, tensors, depth=depth + 1) for item in children])
    if is_plain(value, kind):
        return ("object", kind, *_flatten_entries(vars(value), tensors, depth))
    raise UnknownStructureError(f"an object of type {kind.__name__}")


def _is_named_tuple(kind: type) -> bool:
    """Whether collections.namedtuple or typing.NamedTuple made the class, or one it inherits from."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and hasattr(kind, "_make")


def is_plain(value: object, kind: type) -> bool:
    """Whether the object consists of its attributes alone: its classes are in Python, without slots or a C base."""
    if (
        isinstance(value, torch.nn.Module | Tensor | type | enum.Enum)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    bases = [base for base in kind.__mro__ if base is not object]
    return all(base.__flags__ & HEAP_TYPE and not vars(base).get("__slots__") for base in bases)


def without_constants(spec: Spec) -> Spec:
    """The structure without the values of its constants."""
    if spec[0] == "constant":
        return ("constant",)
    return tuple(without_constants(part) if _is_spec(part) else _entry_without_constants(part) for part in spec)


def _is_spec(part: object) -> bool:
    return isinstance(part, tuple) and bool(part) and (part[0] in TAGS or part[0] in (tuple, list))


def _entry_without_constants(part: object) -> object:
    """An entry of a dict or object without the constants of its value; anything else unchanged."""
    if isinstance(part, tuple) and len(part) == 2 and _is_spec(part[1]):
        return (part[0], without_constants(part[1]))
    return part


def unflatten(spec: Spec, tensors: list[Any]) -> Any:
    """The value of this structure. Effect: pops its tensors from `tensors`, which holds them in reverse order."""
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
    instance = object.__new__(spec[1])
    vars(instance).update((key, unflatten(item, tensors)) for key, item in spec[2:])
    return instance


def _constant(spec: Spec) -> object:
    _, kind, value = spec
    return kind(value) if kind in (float, complex) else value


def rebuild(spec: Spec, tensors: list[Any]) -> Any:
    """The value of this structure, with its tensors in the order in which `flatten` returned them."""
    return unflatten(spec, tensors[::-1])


def key_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A cheaper `key_of`, for calls whose arguments are all positional and plain tensors; None for other calls."""
    if kwargs or not all(type(value) is Tensor for value in args):
        return None
    try:
        return tuple([(tensor.shape, tensor.dtype, tensor.stride(), tensor.is_cpu) for tensor in args])
    except (RuntimeError, NotImplementedError):  # Sparse and nested tensors have no strides.
        return None


def key_of(spec: Spec, tensors: list[Tensor]) -> tuple[Any, ...] | None:
    """A hashable key, equal for calls that may share a capture; None if the arguments cannot be compared."""
    try:
        shapes = tuple((tensor.shape, tensor.dtype, tensor.stride(), tensor.device.type) for tensor in tensors)
        key = (spec, shapes)
        hash(key)
    except (TypeError, RuntimeError, NotImplementedError):  # RuntimeError: sparse and nested tensors have no strides.
        return None
    return key


def describe(tensors: list[Tensor]) -> str:
    """Types and shapes as text, e.g. "float32[1, 128, 768], int64[1, 128]"."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def tensors_of(result: Any) -> list[Tensor]:
    """The dense tensors in a result, as far as its structure is known."""
    tensors: list[Tensor] = []
    with suppress(UnknownStructureError):
        flatten(result, tensors)
    return [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]


def contiguous(result: Any, changed: set[int]) -> Any:
    """The result with contiguous copies of the tensors with these ids, as far as its structure is known."""
    tensors: list[Tensor] = []
    try:
        spec = flatten(result, tensors)
    except UnknownStructureError:
        return result
    return rebuild(spec, [tensor.contiguous() if id(tensor) in changed else tensor for tensor in tensors])
