"""The compiled library cpulaunch/lib/ccl_memory.c: its structures, its functions, and the layout of the memory."""

import ctypes
import mmap
import os
from ctypes import POINTER, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.worker.ccl.wire.reductions import CALL

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
LIBRARY = os.path.join(PACKAGE, MEMORY_LIBRARY)
SLOT_BYTES = 128
"""Distance between slots: two cache lines, so that ranks do not write to the same one."""
PAYLOAD_BYTES, READ_BYTES = 64 << 10, 1 << 20
"""Largest tensor, in bytes, that a rank passes to all others in one piece. Unwritten pages take no memory.

With few ranks it is larger: up to READ_BYTES from all ranks together, a rank reduces whole tensors in less time
than the ranks need to reduce shares of them and to wait for each other once more.
"""
PIECE_BYTES = 128 << 10
"""Largest piece of a larger tensor: it, its copy in the shared memory and another rank's fit into a core's cache."""
BLOCK_BYTES = 512
"""Pieces are a multiple of it: ALIGNED_BYTES in ccl_memory.c."""
SPIN_SECONDS, POLL_SECONDS = 50e-6, 0.5
"""Times that a rank spins before it sleeps, and sleeps before it checks whether the late rank still exists."""
DONE, INTERRUPTED, LEFT, EXITED, LATE, DISAGREES, UNEVEN, ABORTED = range(8)
"""Outcomes of a run, as in ccl_memory.c."""
ALL_RANKS = -2


def _structure(name: str, **fields: Any) -> Any:
    """A structure of ccl_memory.c, which says what its fields mean."""
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


Slot = _structure("Slot", count=c_uint32, has_left=c_uint32, sleepers=c_uint32 * 2, announcements=c_uint64 * 2 * 2)
RankMemory = _structure(
    "RankMemory", slot=c_void_p, payloads=c_void_p * 2, splits=c_void_p * 2, process=c_int32, pidfd=c_int32
)
NativeGroup = _structure(
    "NativeGroup",
    **dict(ranks=POINTER(RankMemory), rank=c_uint32, size=c_uint32),
    **dict.fromkeys(("spin_nanoseconds", "poll_nanoseconds", "timeout_nanoseconds"), c_uint64),
    **dict(payload_bytes=c_uint64, piece_bytes=c_uint64, number=c_uint32, piece=c_uint32),
)
NativeReduction = _structure("NativeReduction", type=c_int32, operation=c_int32, divisor=c_uint32)
Operation = _structure(
    "Operation",
    **dict(call=ctypes.c_uint8 * CALL.size, source=c_void_p, target=c_void_p, bytes=c_uint64),
    **dict(reduction=POINTER(NativeReduction), splits=POINTER(c_uint64), sender=c_int32, scatters=c_uint32),
    **dict(done=c_uint64, deadline=c_uint64, phase=c_uint32, parity=c_uint32, failed_rank=c_int32, other_rank=c_int32),
)

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "version": (c_int,),
    "leave": (None, c_void_p),
    "run": (c_int, c_void_p, c_void_p),
    "all_reduce": (c_int, c_void_p, c_void_p, ctypes.c_char_p, c_void_p, c_uint64, c_void_p),
}
"""Function, without its prefix cpulaunch_ccl_ -> the types of its result and its arguments."""


@cache
def load(path: str = LIBRARY) -> dict[str, Any] | None:
    """The library's functions by name; None if cpulaunch was installed without it, or if it is of another version."""
    try:
        loaded = ctypes.CDLL(path)
        functions = {name: loaded[f"cpulaunch_ccl_{name}"] for name in PROTOTYPES}
    except (OSError, AttributeError):
        return None
    for name, (result, *arguments) in PROTOTYPES.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    return functions if functions["version"]() == MEMORY_LIBRARY_VERSION else None


def payload_bytes(size: int) -> int:
    """Size of a payload in a group of `size` ranks."""
    return max(PAYLOAD_BYTES, READ_BYTES // size // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES * size)


def bytes_needed(size: int) -> int:
    """Bytes of shared memory for a group of `size` ranks: slots, splits and payloads."""
    return payload_offset(size, size, 0)


def splits_offset(size: int, rank: int, parity: int) -> int:
    """Byte offset of a rank's splits for pieces of even (0) or odd (1) number."""
    return SLOT_BYTES * size + (2 * rank + parity) * 2 * size * 8


def payload_offset(size: int, rank: int, parity: int) -> int:
    """Byte offset of a rank's payload, likewise; page-aligned."""
    before, each = (-(-count // mmap.PAGESIZE) for count in (splits_offset(size, size, 0), payload_bytes(size)))
    return (before + (2 * rank + parity) * each) * mmap.PAGESIZE
