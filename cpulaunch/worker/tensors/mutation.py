"""What a graph writes to: its own results only, or the caller's and the module's tensors too."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

STATISTICS = ("batch_norm", "native_batch_norm", "instance_norm")
"""Operations that update running statistics (argument 3) when argument 5 says so, which no schema or version tells.

Source: pytorch/aten/src/ATen/native/native_functions.yaml.
"""


class WrittenError(Exception):
    """An operation was about to write to a tensor that is not the graph's own."""


class OwnResultsOnly(TorchDispatchMode):
    """While it lasts, an operation that would write to the memory of one of `tensors` raises WrittenError instead."""

    supports_higher_order_operators = True

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._foreign = set(map(storage_of, tensors)) - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if isinstance(value, Tensor) and storage_of(value) in self._foreign:
                raise WrittenError(str(func))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    if schema.name.removeprefix("aten::") in STATISTICS:
        return list(args[3:5]) if args[5] else []
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written: list[Any] = []
    for argument in schema.arguments:
        if argument.is_write and argument.name in values:
            value = values[argument.name]
            written.extend(value if isinstance(value, list | tuple) else [value])
    return written


def storage_of(tensor: Tensor) -> int:
    """The address of the memory the tensor is in; 0 without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # Sparse and the like.
        return 0
