"""Whether arguments or results hold objects that may carry tensors to later calls, such as a key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
