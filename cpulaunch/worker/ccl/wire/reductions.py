"""Types and reductions: torch's, oneCCL's, and what a call looks like when ranks compare notes."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from cpulaunch.records.record import record
from cpulaunch.worker.ccl.wire import codes
from cpulaunch.worker.ccl.wire.codes import CALL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TYPES = {
    torch.float32: codes.FLOAT32,
    torch.float64: codes.FLOAT64,
    torch.bfloat16: codes.BFLOAT16,
    torch.float16: codes.FLOAT16,
    torch.int8: codes.INT8,
    torch.uint8: codes.UINT8,
    torch.int32: codes.INT32,
    torch.int64: codes.INT64,
    torch.bool: codes.UINT8,
}
"""What can be reduced. What is only moved may be of any type."""

_Op: Any = ReduceOp.RedOpType
OPERATIONS = {_Op.SUM: codes.SUM, _Op.PRODUCT: codes.PROD, _Op.MIN: codes.MIN, _Op.MAX: codes.MAX, _Op.AVG: codes.SUM}
"""An average is a sum divided afterwards: oneCCL 2022.1 refuses its own for host memory."""
_OF_BOOLS = {_Op.SUM: codes.MAX, _Op.MAX: codes.MAX, _Op.PRODUCT: codes.MIN, _Op.MIN: codes.MIN}
"""A sum of bools is true where any is, and a bool stays 0 or 1."""

_TYPE_NAMES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=lambda dtype: str(dtype)
)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(dict.fromkeys(_TYPE_NAMES))}
"""Ranks run the same torch, so the same number for the same type."""

CALLS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
_REDUCTIONS = ("", "sum", "product", "min", "max", "avg")
_REDUCTION_NUMBERS = {_Op.SUM: 1, _Op.PRODUCT: 2, _Op.MIN: 3, _Op.MAX: 4, _Op.AVG: 5}


@record
class Reduction:
    """How elements of a type are reduced: oneCCL's numbers, this package's own, and whether to divide afterwards."""

    kind: int
    operation: int
    number: int
    averages: bool

    def finish(self, flat: torch.Tensor, size: int) -> None:
        """Effect: a sum over this many ranks becomes the average, where that was asked."""
        if not self.averages:
            return
        if flat.is_floating_point():
            flat.div_(size)
        else:  # The size need not be a number of the type.
            flat.copy_(flat.long().div_(size, rounding_mode="trunc"))


_reductions: dict[tuple[int, torch.dtype], Reduction] = {}


def reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """How to reduce. Raises: NotImplementedError for what oneCCL cannot."""
    asked = getattr(operation, "op", operation)
    key = int(asked), dtype
    known = _reductions.get(key)
    if known is None:
        known = _reductions[key] = _reduction(asked, dtype)
    return known


def _reduction(asked: Any, dtype: torch.dtype) -> Reduction:
    operations = _OF_BOOLS if dtype == torch.bool else OPERATIONS
    if dtype not in TYPES or asked not in operations:
        name = str(getattr(asked, "name", asked)).lower()
        raise NotImplementedError(f"oneCCL cannot compute the {name} of {dtype}; the gloo backend may")
    return Reduction(
        kind=TYPES[dtype], operation=operations[asked], number=_REDUCTION_NUMBERS[asked], averages=asked == _Op.AVG
    )


def packed_call(name: str, dtype: torch.dtype, count: int, *, root: int = -1, reduced: int = 0) -> bytes:
    """A call as the ranks of a group compare it."""
    return CALL.pack(count, root, CALLS.index(name), _TYPE_NUMBERS[dtype], reduced, 0)


def described(call: bytes) -> str:
    """A packed call in words."""
    count, root, name, number, reduced, _ = CALL.unpack(call)
    dtype = next((str(dtype).removeprefix("torch.") for dtype, each in _TYPE_NUMBERS.items() if each == number), "?")
    words = [f"{CALLS[name] if name < len(CALLS) else '?'} of {count} {dtype}"]
    if reduced:
        words.append(f"({_REDUCTIONS[reduced]})")
    if root >= 0:
        words.append(f"with root {root}")
    return " ".join(words)
