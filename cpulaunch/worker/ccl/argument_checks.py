"""Checks of a collective's tensors, which raise before any data moves."""

from __future__ import annotations

import sys

import torch

from cpulaunch.worker.ccl.wire.errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PLAIN = torch.Tensor.__torch_dispatch__
"""The __torch_dispatch__ of classes that hold their elements as a torch.Tensor does."""
_FUNCTIONAL = "torch.distributed._functional_collectives"


def plain(tensor: Tensor) -> Tensor:
    """The tensor, on the CPU with its elements in strides. Raises: UnsupportedError if it is another kind of tensor."""
    if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ != _PLAIN:
        functional = sys.modules.get(_FUNCTIONAL)
        if functional is None or not isinstance(tensor, functional.AsyncCollectiveTensor):
            raise UnsupportedError(f"collectives of {type(tensor).__name__}")
        tensor = tensor.trigger_wait()  # The result of a collective, once it is complete.
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise UnsupportedError(f"collectives of {tensor.layout} tensors on {tensor.device}")
    return tensor


def check_writable(tensors: Sequence[Tensor]) -> None:
    """Raises: ValueError if elements of a tensor share memory, as those of an expanded tensor do."""
    for tensor in tensors:
        if tensor.is_contiguous():
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"a tensor with strides {tuple(tensor.stride())} cannot be written to: pass a clone")


def single(tensors: Sequence[Tensor]) -> Tensor:
    """The only tensor in the list. Raises: ValueError if the list holds more or none; as plain."""
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor per rank, got {len(tensors)}")
    return plain(tensors[0])


def single_list(lists: Sequence[Sequence[Tensor]], size: int) -> list[Tensor]:
    """The only list, which holds one tensor per rank. Raises: ValueError if it does not; as plain."""
    if len(lists) != 1:
        raise ValueError(f"expected one list of tensors per rank, got {len(lists)}")
    return per_rank(lists[0], size)


def per_rank(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The tensors. Raises: ValueError unless there is one per rank; as plain."""
    if len(tensors) != size:
        raise ValueError(f"expected {size} tensors, one per rank; got {len(tensors)}")
    return [plain(tensor) for tensor in tensors]


def check_same_type(tensors: Sequence[Tensor]) -> None:
    """Raises: ValueError unless all have one type."""
    types = sorted({str(tensor.dtype) for tensor in tensors})
    if len(types) > 1:
        raise ValueError(f"tensors of different types: {', '.join(types)}")


def check_match(one: Tensor, other: Tensor, its_name: str, other_name: str) -> None:
    """Raises: ValueError unless both have as many elements, of one type."""
    check_same_type([one, other])
    if one.numel() != other.numel():
        raise ValueError(f"the {its_name} has {one.numel()} elements, the {other_name} {other.numel()}")


def check_whole(whole: Tensor, part: Tensor, size: int) -> None:
    """Raises: ValueError unless `whole` has `size` times as many elements as `part`, of the same type."""
    check_same_type([whole, part])
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"expected {size * part.numel()} elements ({size} ranks of {part.numel()}), got {whole.numel()}"
        )


def split_elements(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each rank's part of the tensor, which has `rows` rows; equal parts if `rows` is empty.

    Raises: ValueError if the rows do not add up to the tensor's.
    """
    total, rows = tensor.shape[0] if tensor.dim() else 1, [int(each) for each in rows]
    if not rows and total % size:
        raise ValueError(f"{total} rows cannot be divided evenly among {size} ranks")
    parts = rows or [total // size] * size
    if len(parts) != size or sum(parts) != total or min(parts) < 0:
        raise ValueError(f"the splits {parts} do not add up to {total} rows for {size} ranks")
    return [part * (tensor.numel() // total if total else 0) for part in parts]
