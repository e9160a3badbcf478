"""What a collective's tensors must be like: each check raises before anything moves, and says what it saw."""

from __future__ import annotations

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def check(tensors: Sequence[Tensor]) -> None:
    """Raises: NotImplementedError for what is not in the CPU's memory, or sparse."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotImplementedError(f"the ccl backend is for tensors of the CPU, not of {tensor.device}")
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"the ccl backend has no {tensor.layout} tensors; the gloo backend may")


def check_room(tensors: Sequence[Tensor]) -> None:
    """Raises: ValueError if a tensor has no place for each of its elements, as what `expand` makes."""
    for tensor in tensors:
        if not tensor.is_contiguous() and 0 in tensor.stride():
            raise ValueError(f"a tensor with strides {tuple(tensor.stride())} cannot be filled: give a clone of it")


def single(tensors: Sequence[Tensor]) -> Tensor:
    """The one tensor. Raises: ValueError if there are others."""
    if len(tensors) != 1:
        raise ValueError(f"a rank gives one tensor, not {len(tensors)}")
    check(tensors)
    return tensors[0]


def single_list(lists: Sequence[Sequence[Tensor]], size: int) -> Sequence[Tensor]:
    """The one list, of a tensor for each rank. Raises: ValueError."""
    if len(lists) != 1:
        raise ValueError(f"a rank gives one list of tensors, not {len(lists)}")
    check_count(lists[0], size)
    check(lists[0])
    return lists[0]


def check_count(tensors: Sequence[Tensor], size: int) -> None:
    """Raises: ValueError unless there is a tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} tensors for {size} ranks")


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
    """Raises: ValueError unless the whole has a part for each rank."""
    check([whole, part])
    check_same_type([whole, part])
    if whole.numel() != part.numel() * size:
        raise ValueError(f"{whole.numel()} elements are not {size} times {part.numel()}")


def check_even(target: Tensor, source: Tensor, size: int) -> None:
    """Raises: ValueError unless both are of one size that the ranks can share."""
    check([target, source])
    check_match(target, source, "output", "input")
    if source.dim() and source.shape[0] % size:
        raise ValueError(f"{source.shape[0]} rows cannot be shared evenly by {size} ranks")


def split(tensor: Tensor, rows: Sequence[int], size: int) -> list[Tensor]:
    """Views of the tensor for each rank; even without rows. Raises: ValueError if the rows are not the tensor's."""
    check([tensor])
    total = tensor.shape[0]
    if not rows and total % size:
        raise ValueError(f"{total} rows cannot be shared evenly by {size} ranks")
    parts = list(rows) or [total // size] * size
    if len(parts) != size or sum(parts) != total:
        raise ValueError(f"splits {parts} for {size} ranks and {total} rows")
    return list(tensor.split(parts))
