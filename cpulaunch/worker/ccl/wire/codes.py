"""Numbers that all ranks of a group share: element types, reductions, and the layout of a packed call.

Source: oneCCL 2022.1, include/oneapi/ccl/v2/types.h, for types and reductions; the memory path uses the same numbers.
"""

from __future__ import annotations

import struct

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN = range(4)

CALL = struct.Struct("<QiBBBB")
"""Number of elements, root, then the numbers of the collective, the type and the reduction, and one unused byte."""
