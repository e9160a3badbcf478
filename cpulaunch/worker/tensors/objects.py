"""Whether arguments or results hold objects that may carry tensors to later calls, such as a key-value cache."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cpulaunch.worker.tensors.pytree import CONSTANTS, UnknownStructureError, flatten

_SIMPLE = frozenset((Tensor, torch.nn.Parameter, *CONSTANTS))


def holds_objects(*values: Any) -> bool:
    """Whether there is anything but tensors, constants, and tuples, lists and mappings of these among the values.

    A call may keep tensors in such an object, and a later call expects them in the dtype of its own computation.
    """
    for value in values:
        kind = type(value)
        if kind in _SIMPLE:
            continue
        if isinstance(value, tuple | list):
            if holds_objects(*value):
                return True
        elif isinstance(value, Mapping):
            if holds_objects(*value.values()):
                return True
        else:
            return True
    return False


def is_known(value: Any) -> bool:
    """Whether all tensors of a result can be found, and so be given back to the program in its own dtype."""
    try:
        flatten(value, [])
    except UnknownStructureError:
        return False
    return True


Form: TypeAlias = "tuple[Any, ...]"
"""What may decide which tensors a call returns, and where it leaves others: calls of one form do the same with them."""


Part: TypeAlias = tuple[weakref.ref[nn.Module], tuple[str, ...]]
"""A part of a module, and the names of its attributes that are flags or texts."""


def form_of(parts: tuple[Part, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """The types of the arguments, with the values of flags and texts among them and among the parts' attributes."""
    flags: list[Any] = [*map(_form, args)]
    if kwargs:
        flags += [*kwargs, *map(_form, kwargs.values())]
    for reference, names in parts:
        part = reference()
        if part is not None:
            attributes = part.__dict__
            flags.append(len(attributes))  # A new one may be a flag too.
            if names:
                flags += [_form(attributes.get(name)) for name in names]
    return tuple(flags)


def _form(value: Any) -> Any:
    kind = type(value)
    return value if kind is bool or kind is str else kind


def own_parts(module: nn.Module) -> tuple[Part, ...]:
    """The module and its parts, without those of torch itself."""
    with suppress(Exception):  # A class may override `modules`.
        parts = [part for part in module.modules() if not str(type(part).__module__).startswith("torch.nn.")]
        return tuple((weakref.ref(part), _flags(part)) for part in parts)
    return ()


def _flags(part: nn.Module) -> tuple[str, ...]:
    names = (name for name, value in part.__dict__.items() if isinstance(value, bool | str))
    return tuple(name for name in names if name != "training")
