"""Checks of a collective's tensors, which raise before any data moves."""

from __future__ import annotations

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def check(tensors: Sequence[Tensor]) -> None:
    """Raises: NotImplementedError if a tensor is not on the CPU, or is sparse."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotImplementedError(f"the ccl backend supports CPU tensors only, not {tensor.device}")
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"the ccl backend does not support {tensor.layout} tensors; gloo may")


def check_writable(tensors: Sequence[Tensor]) -> None:
    """Raises: ValueError if elements of a tensor share memory, as those of an expanded tensor do."""
    for tensor in tensors:
        if not tensor.is_contiguous() and 0 in tensor.stride():
            raise ValueError(f"a tensor with strides {tuple(tensor.stride())} cannot be written to: pass a clone")


def single(tensors: Sequence[Tensor]) -> Tensor:
    """The only tensor in the list. Raises: ValueError if the list holds more or none; as check."""
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor per rank, got {len(tensors)}")
    check(tensors)
    return tensors[0]


def single_list(lists: Sequence[Sequence[Tensor]], size: int) -> Sequence[Tensor]:
    """The only list, which holds one tensor per rank. Raises: ValueError if it does not; as check."""
    if len(lists) != 1:
        raise ValueError(f"expected one list of tensors per rank, got {len(lists)}")
    check_count(lists[0], size)
    check(lists[0])
    return lists[0]


def check_count(tensors: Sequence[Tensor], size: int) -> None:
    """Raises: ValueError unless there is one tensor per rank."""
    if len(tensors) != size:
        raise ValueError(f"expected {size} tensors, one per rank; got {len(tensors)}")


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
    check([whole, part])
    check_same_type([whole, part])
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"expected {size * part.numel()} elements ({size} ranks of {part.numel()}), got {whole.numel()}"
        )


def check_even(target: Tensor, source: Tensor, size: int) -> None:
    """Raises: ValueError unless both have the same size, and rows that divide evenly among the ranks."""
    check([target, source])
    check_match(target, source, "output", "input")
    if source.dim() and source.shape[0] % size:
        raise ValueError(f"{source.shape[0]} rows cannot be divided evenly among {size} ranks")


def split(tensor: Tensor, rows: Sequence[int], size: int) -> list[Tensor]:
    """Views of the tensor, one per rank, of `rows` rows each; equal parts if `rows` is empty.

    Raises: ValueError if the rows do not add up to the tensor's.
    """
    check([tensor])
    total = tensor.shape[0]
    if not rows and total % size:
        raise ValueError(f"{total} rows cannot be divided evenly among {size} ranks")
    parts = list(rows) or [total // size] * size
    if len(parts) != size or sum(parts) != total:
        raise ValueError(f"the splits {parts} do not add up to {total} rows for {size} ranks")
    return list(tensor.split(parts))
