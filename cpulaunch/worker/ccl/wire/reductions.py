"""Numbers of element types and reductions, and the packed calls that ranks compare before a collective.

Source: oneCCL 2022.1, include/oneapi/ccl/v2/types.h, for types and reductions; the memory path uses the same numbers.
"""

import struct
from functools import cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from cpulaunch.records.record import record
from cpulaunch.worker.ccl.wire.errors import UnsupportedError

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN = range(4)

_INTEGERS = {torch.int8: INT8, torch.uint8: UINT8, torch.int32: INT32, torch.int64: INT64, torch.bool: UINT8}
_FLOATS = {torch.float16: FLOAT16, torch.float32: FLOAT32, torch.float64: FLOAT64, torch.bfloat16: BFLOAT16}
TYPES = _INTEGERS | _FLOATS
"""torch type -> number of the type that ccl reduces. Collectives that only move data accept any type."""

_Op: Any = ReduceOp.RedOpType
OPERATIONS = {_Op.SUM: SUM, _Op.PRODUCT: PROD, _Op.MIN: MIN, _Op.MAX: MAX, _Op.AVG: SUM}
"""torch reduction -> oneCCL's. An average is a sum, divided afterwards: oneCCL 2022.1 cannot average host memory."""
_BOOL_OPERATIONS = {_Op.SUM: MAX, _Op.MAX: MAX, _Op.PRODUCT: MIN, _Op.MIN: MIN}
"""As OPERATIONS, for the bytes of bools, where all but 0 are true: a sum is true where any element is."""
_NAMES = ("", *(each.name.lower() for each in OPERATIONS))
"""Names of reductions by their number in a packed call; the first one stands for none."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
"""torch type -> its number in a packed call; equal in all ranks, which run the same version of torch."""

CALL = struct.Struct("<QiBBBB")
"""Number of elements, root, then the numbers of the collective, the type and the reduction, and one unused byte."""
CALLS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all"),
    *("gather", "scatter", "barrier"),
)
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
        if self.averages and flat.is_floating_point():
            flat.div_(size)
        elif self.averages:  # The type may be too small for the number of ranks.
            flat.copy_(flat.long().div_(size, rounding_mode="trunc"))


def find_reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """How a torch ReduceOp reduces elements of a type. Raises: UnsupportedError."""
    return _make_reduction(int(getattr(operation, "op", operation)), dtype)


@cache
def _make_reduction(number: int, dtype: torch.dtype) -> Reduction:
    requested = _Op(number)
    operation = (_BOOL_OPERATIONS if dtype == torch.bool else OPERATIONS).get(requested)
    if dtype not in TYPES or operation is None:
        raise UnsupportedError(f"the {requested.name.lower()} of {dtype}")
    number, averages = _NAMES.index(requested.name.lower()), requested == _Op.AVG
    return Reduction(kind=TYPES[dtype], operation=operation, number=number, averages=averages)


def packed_call(name: str, dtype: torch.dtype, count: int, *, root: int | None = None, reduced: int = 0) -> bytes:
    """A call as the ranks of a group compare it: `reduced` is the number of the reduction, 0 for none."""
    return CALL.pack(count, _NO_ROOT if root is None else root, CALLS.index(name), _TYPE_NUMBERS[dtype], reduced, 0)


def name_and_root(call: bytes) -> tuple[str, int]:
    """The collective of a packed call, and its root, which means nothing if the collective has none."""
    _, root, number, *_ = CALL.unpack(call)
    return CALLS[number], root


def describe_call(call: bytes) -> str:
    """A packed call as text for messages, such as "reduce of 4 float32 (sum) with root 1"."""
    count, root, name, number, reduced, _ = CALL.unpack(call)
    dtype = str(_DTYPES[number]).removeprefix("torch.") if number < len(_DTYPES) else "?"
    text = f"{CALLS[name] if name < len(CALLS) else '?'} of {count} {dtype}"
    if reduced:
        text += f" ({_NAMES[reduced] if reduced < len(_NAMES) else '?'})"
    return text if root == _NO_ROOT else f"{text} with root {root}"
