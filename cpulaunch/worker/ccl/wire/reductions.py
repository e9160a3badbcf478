"""Numbers of torch's element types and reductions, and the packed calls that ranks compare before a collective."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from cpulaunch.records.record import record
from cpulaunch.worker.ccl.wire import codes
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import UnsupportedError

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
"""torch type -> number of the type that ccl reduces. Collectives that only move data accept any type."""

_Op: Any = ReduceOp.RedOpType
OPERATIONS = {_Op.SUM: codes.SUM, _Op.PRODUCT: codes.PROD, _Op.MIN: codes.MIN, _Op.MAX: codes.MAX, _Op.AVG: codes.SUM}
"""torch reduction -> oneCCL's. An average is a sum, divided afterwards: oneCCL 2022.1 cannot average host memory."""
_BOOL_OPERATIONS = {_Op.SUM: codes.MAX, _Op.MAX: codes.MAX, _Op.PRODUCT: codes.MIN, _Op.MIN: codes.MIN}
"""As OPERATIONS, for the bytes of bools, where all but 0 are true: a sum is true where any element is."""

_TYPE_NAMES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=lambda dtype: str(dtype)
)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(dict.fromkeys(_TYPE_NAMES))}
"""torch type -> its number in a packed call; equal in all ranks, which run the same version of torch."""

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
_NO_ROOT = -1
"""The root in a packed call of a collective that has none."""


@record
class Reduction:
    """How elements of one type are reduced.

    `kind` and `operation` are oneCCL's numbers for the type and the reduction; `number` identifies the reduction in a
    packed call; `averages`: whether the sum is divided by the number of ranks afterwards.
    """

    kind: int
    operation: int
    number: int
    averages: bool

    def finish(self, flat: torch.Tensor, size: int) -> None:
        """Effect: if the reduction is an average, divides the sum in `flat` by `size`, the number of ranks."""
        if not self.averages:
            return
        if flat.is_floating_point():
            flat.div_(size)
        else:  # The type may be too small for the number of ranks.
            flat.copy_(flat.long().div_(size, rounding_mode="trunc"))


_reductions: dict[tuple[int, torch.dtype], Reduction] = {}


def find_reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """How a torch ReduceOp reduces elements of a type. Raises: UnsupportedError."""
    requested = getattr(operation, "op", operation)
    key = int(requested), dtype
    known = _reductions.get(key)
    if known is None:
        known = _reductions[key] = _make_reduction(requested, dtype)
    return known


def _make_reduction(requested: Any, dtype: torch.dtype) -> Reduction:
    operations = _BOOL_OPERATIONS if dtype == torch.bool else OPERATIONS
    if dtype not in TYPES or requested not in operations:
        name = str(getattr(requested, "name", requested)).lower()
        raise UnsupportedError(f"the {name} of {dtype}")
    return Reduction(
        kind=TYPES[dtype],
        operation=operations[requested],
        number=_REDUCTION_NUMBERS[requested],
        averages=requested == _Op.AVG,
    )


def packed_call(name: str, dtype: torch.dtype, count: int, *, root: int | None = None, reduced: int = 0) -> bytes:
    """A call as the ranks of a group compare it: `reduced` is the number of the reduction, 0 for none."""
    return CALL.pack(count, _NO_ROOT if root is None else root, CALLS.index(name), _TYPE_NUMBERS[dtype], reduced, 0)


def describe_call(call: bytes) -> str:
    """A packed call as text for messages, such as "reduce of 4 float32 (sum) with root 1"."""
    count, root, name, number, reduced, _ = CALL.unpack(call)
    dtype = next((str(dtype).removeprefix("torch.") for dtype, each in _TYPE_NUMBERS.items() if each == number), "?")
    words = [f"{CALLS[name] if name < len(CALLS) else '?'} of {count} {dtype}"]
    if reduced:
        words.append(f"({_REDUCTIONS[reduced] if reduced < len(_REDUCTIONS) else '?'})")
    if root != _NO_ROOT:
        words.append(f"with root {root}")
    return " ".join(words)
