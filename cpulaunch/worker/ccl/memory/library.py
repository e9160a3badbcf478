"""The compiled library cpulaunch/lib/ccl_memory.c: its structures, its functions, and a rank's view of its group."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from ctypes import POINTER, Structure, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache

from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.worker.ccl.wire.codes import CALL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

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


class Slot(Structure):
    """struct slot: a rank's part of the shared memory."""

    _fields_ = (
        ("count", c_uint32),
        ("has_left", c_uint32),
        ("sleepers", c_uint32 * 2),
        ("announcements", c_uint64 * 2 * 2),
    )


class RankMemory(Structure):
    """struct rank: what this process knows of a rank."""

    _fields_ = (
        ("slot", c_void_p),
        ("payloads", c_void_p * 2),
        ("splits", c_void_p * 2),
        ("process", c_int32),
        ("pidfd", c_int32),
    )


class NativeGroup(Structure):
    """struct group: one rank's view of its group."""

    _fields_ = (
        ("ranks", POINTER(RankMemory)),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("spin_nanoseconds", c_uint64),
        ("poll_nanoseconds", c_uint64),
        ("timeout_nanoseconds", c_uint64),
        ("payload_bytes", c_uint64),
        ("piece_bytes", c_uint64),
        ("number", c_uint32),
        ("piece", c_uint32),
    )


class NativeReduction(Structure):
    """struct reduction: the numbers of the type and the operation, and what the result is divided by."""

    _fields_ = (("type", c_int32), ("operation", c_int32), ("divisor", c_uint32))


class Operation(Structure):
    """struct operation: a collective of this rank."""

    _fields_ = (
        ("call", ctypes.c_uint8 * CALL.size),
        ("source", c_void_p),
        ("target", c_void_p),
        ("bytes", c_uint64),
        ("reduction", POINTER(NativeReduction)),
        ("splits", POINTER(c_uint64)),
        ("sender", c_int32),
        ("scatters", c_uint32),
        ("done", c_uint64),
        ("deadline", c_uint64),
        ("phase", c_uint32),
        ("parity", c_uint32),
        ("failed_rank", c_int32),
        ("other_rank", c_int32),
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
    return _payload_offset(size, size, 0)


def _splits_offset(size: int, rank: int, parity: int) -> int:
    return SLOT_BYTES * size + (2 * rank + parity) * 2 * size * 8


def _payload_offset(size: int, rank: int, parity: int) -> int:
    """Byte offset of a rank's payload for pieces of even (0) or odd (1) number; page-aligned."""
    before = -(-_splits_offset(size, size, 0) // mmap.PAGESIZE) * mmap.PAGESIZE
    return before + (2 * rank + parity) * (-(-payload_bytes(size) // mmap.PAGESIZE) * mmap.PAGESIZE)


def close_all(descriptors: Sequence[int]) -> None:
    """Effect: closes the descriptors."""
    for descriptor in descriptors:
        with suppress(OSError):  # -1, or one that the program has closed, as daemons do.
            os.close(descriptor)


class SharedGroup:
    """One rank's view of its group, in memory that all ranks have mapped."""

    def __init__(
        self, memory: mmap.mmap, *, rank: int, processes: Sequence[int], pidfds: Sequence[int], seconds: float
    ) -> None:
        """`processes` and `pidfds` are of all ranks, verified; a pidfd is -1 if unknown. Raises: OSError."""
        functions, size = load(), len(processes)
        if functions is None:
            raise OSError("the compiled library is missing")
        self.rank, self.size, self.functions = rank, size, functions
        self.processes, self._owner = list(processes), os.getpid()
        self._close_pidfds = weakref.finalize(self, close_all, list(pidfds))
        self._close_pidfds.atexit = False
        anchor = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(anchor)
        ranks = (RankMemory * size)()
        for each in range(size):
            ranks[each].slot = start + SLOT_BYTES * each
            for parity in (0, 1):
                ranks[each].payloads[parity] = start + _payload_offset(size, each, parity)
                ranks[each].splits[parity] = start + _splits_offset(size, each, parity)
            ranks[each].process, ranks[each].pidfd = processes[each], pidfds[each]
        self._kept_alive = memory, anchor, ranks
        self.native = NativeGroup(ranks=ranks, rank=rank, size=size)
        self.native.spin_nanoseconds, self.native.poll_nanoseconds = int(SPIN_SECONDS * 1e9), int(POLL_SECONDS * 1e9)
        self.native.payload_bytes = payload_bytes(size)
        self.native.piece_bytes = min(PIECE_BYTES, payload_bytes(size))
        self.pointer = ctypes.byref(self.native)
        self.set_timeout(seconds)
        if len(self._cpus()) < size:
            self.native.spin_nanoseconds = 0  # A late rank may need this rank's CPU.

    def set_timeout(self, seconds: float) -> None:
        """Effect: a rank that is later than this by `seconds` is lost."""
        self.seconds = seconds
        self.native.timeout_nanoseconds = int(min(seconds, 1e9) * 1e9)

    def slot(self, rank: int) -> Slot:
        """A rank's slot in the shared memory."""
        return Slot.from_address(self.native.ranks[rank].slot)

    def splits(self, rank: int, parity: int) -> Sequence[int]:
        """Bytes that a rank sends to each rank in an all-to-all, then bytes that it expects from each."""
        table = (c_uint64 * (2 * self.size)).from_address(self.native.ranks[rank].splits[parity])
        return list(table)

    def _cpus(self) -> set[int]:
        """All CPUs on which the ranks may run. Source: sched_getaffinity(2)."""
        found: set[int] = set()
        for process in self.processes:
            with suppress(OSError):  # The process has exited.
                found |= os.sched_getaffinity(process)
        return found

    def leave(self) -> None:
        """Effect: ranks that wait for this one, now or later, fail. Does nothing in a forked child."""
        if os.getpid() == self._owner:
            self.functions["leave"](self.pointer)

    def close(self) -> None:
        """Effect: leaves, and closes the descriptors of the other ranks' processes."""
        self.leave()
        for rank in range(self.size):
            self.native.ranks[rank].pidfd = -1
        self._close_pidfds()
