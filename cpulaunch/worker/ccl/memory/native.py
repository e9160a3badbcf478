"""Meetings and reductions in one host's memory by the compiled library cpulaunch/lib/ccl_memory.c.

Its calls take microseconds instead of tens of them, and hold up no thread that computes in Python. The library is
optional: `open_native_barrier` and `open_path` give what is written in Python where cpulaunch was installed without a C
compiler. Ranks of both kinds can be in one group.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_uint32, c_uint64, c_void_p

import torch

from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.worker.ccl.memory.path import ALL, MemoryPath
from cpulaunch.worker.ccl.memory.shared_barrier import (
    CALL_BYTES,
    CALLS_AT,
    PAYLOAD_BYTES,
    POLL_SECONDS,
    SharedBarrier,
)
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.wire.reductions import Reduction

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
LIBRARY = os.path.join(PACKAGE, MEMORY_LIBRARY)
SPIN_SECONDS = 50e-6
"""How long a rank looks for another before it sleeps: ranks that compute the same mostly arrive within that."""
CHUNK_BYTES = 256 << 10
"""What is reduced at a time: with a peer's it is to stay in a core's cache."""
_ROUND = 0xFFFFFFFF


class _Rank(Structure):
    _fields_ = (("place", c_void_p), ("payloads", c_void_p * 2))


class _NativeRank(Structure):
    _fields_ = (
        ("ranks", POINTER(_Rank)),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("spin_nanoseconds", c_uint64),
        ("glance_nanoseconds", c_uint64),
        ("scratch", c_void_p),
        ("chunk_bytes", c_uint64),
    )


class _Reduction(Structure):
    _fields_ = (("type", c_int32), ("operation", c_int32), ("divisor", c_uint32))


class _Share(Structure):
    _fields_ = (
        ("own", c_void_p),
        ("target", c_void_p),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("sent_to", c_int32),
        ("culprit", c_int32),
    )


_AT = (c_void_p, c_uint32)  # seat, number of the barrier
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "version": (),
    "knows": (c_int,),
    "await": _AT,
    "wait": _AT,
    "compare": _AT,
    "meet": (*_AT, ctypes.c_char_p, c_uint64, c_uint64),
    "all_reduce_small": (*_AT, ctypes.c_char_p, c_void_p, c_uint64, c_void_p),
    "reduce_brought": (*_AT, c_void_p, c_uint64, c_void_p),
    "reduce_share": (*_AT, c_void_p, c_void_p),
}


class NativeLibrary:
    """The library's functions, by their names without what they all begin with."""

    def __init__(self, path: str) -> None:
        """Raises: OSError, AttributeError if it cannot be loaded, or is not what it should be."""
        loaded = ctypes.CDLL(path)
        functions = {name: loaded[f"cpulaunch_ccl_{name}"] for name in PROTOTYPES}
        for name, arguments in PROTOTYPES.items():
            functions[name].argtypes = arguments
        self.version, self.knows = functions["version"], functions["knows"]
        self.await_, self.wait = functions["await"], functions["wait"]
        self.compare, self.meet = functions["compare"], functions["meet"]
        self.all_reduce_small, self.reduce_brought = functions["all_reduce_small"], functions["reduce_brought"]
        self.reduce_share = functions["reduce_share"]


def load(path: str = LIBRARY) -> NativeLibrary | None:
    """The library; None if cpulaunch was installed without it, or it is another version's."""
    try:
        library = NativeLibrary(path)
    except (OSError, AttributeError):
        return None
    return library if library.version() == MEMORY_LIBRARY_VERSION else None


class NativeBarrier(SharedBarrier):
    """One rank's seat at its group's barriers, taken by the library."""

    def __init__(
        self, library: NativeLibrary, memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]
    ) -> None:
        super().__init__(memory, rank=rank, size=size, describe=describe)
        self.library = library
        scratch = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        starts = [
            [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in self.payloads(r)] for r in range(size)
        ]
        ranks = (_Rank * size)(
            *[_Rank(ctypes.addressof(self._counts[r]), (c_void_p * 2)(*starts[r])) for r in range(size)]
        )
        self._held = scratch, ranks
        self._seat = _NativeRank(
            ranks=ranks,
            rank=rank,
            size=size,
            spin_nanoseconds=int(SPIN_SECONDS * 1e9),
            glance_nanoseconds=int(POLL_SECONDS * 1e9),
            scratch=scratch.data_ptr(),
            chunk_bytes=CHUNK_BYTES,
        )
        self._at = byref(self._seat)

    def sleep_at_once(self) -> None:
        """As SharedBarrier.sleep_at_once."""
        self._seat.spin_nanoseconds = 0

    def meet(self, call: bytes, seconds: float, *, words: tuple[int, int] = (0, 0)) -> None:
        """As SharedBarrier.meet."""
        self._number = number = self._number + 1 & _ROUND
        state = self.library.meet(self._at, number, call, *words)
        if state:
            self._settle(state, call, seconds)

    def wait(self, seconds: float) -> None:
        """As SharedBarrier.wait."""
        self._number = number = self._number + 1 & _ROUND
        late = self.library.wait(self._at, number)
        if late:
            self._persist(late, seconds)

    def all_reduce(self, call: bytes, seconds: float, *, address: int, count: int, how: Any) -> None:
        """Effect: all ranks have met, and what all brought along is reduced at the address. Raises: as meet."""
        self._number = number = self._number + 1 & _ROUND
        state = self.library.all_reduce_small(self._at, number, call, address, count, how)
        if state:
            self._settle(state, call, seconds)
            self.library.reduce_brought(self._at, number, address, count, how)

    def reduce_share(self, share: _Share, how: Any) -> int:
        """0, or the errno of what went wrong with the memory of the culprit."""
        return int(self.library.reduce_share(self._at, self._number, byref(share), how))

    def _settle(self, state: int, call: bytes, seconds: float) -> None:
        """Effect: as meet, after the library's word on it: who is late, or -1 - who disagrees."""
        if state > 0:
            self._persist(state, seconds)
            state = self.library.compare(self._at, self._number)
        if state < 0:
            other = -1 - state
            theirs = self._slots[other] + CALLS_AT + CALL_BYTES * (self._number & 1)
            raise RanksDisagreeError(self._disagreement(call, other, self._memory[theirs : theirs + CALL.size]))

    def _persist(self, late: int, seconds: float) -> None:
        """Effect: returns when all ranks are here; `late` is 1 + one that was not. Raises: PeerLostError."""
        deadline = time.monotonic() + seconds
        while late:
            other = late - 1
            gone = self._gone(other)  # Before the look at the count: it may come, and go, in between.
            is_there = self._is_there(other, self._number)
            if gone and not is_there:
                raise self._lost(other, gone)
            if time.monotonic() > deadline and not is_there:
                raise self._late(other, seconds)
            late = self.library.await_(self._at, self._number)


class NativePath(MemoryPath):
    """One rank's way into the others' memory, with the library's reductions."""

    def __init__(self, barrier: NativeBarrier, seconds: float) -> None:
        super().__init__(barrier, seconds)
        self._native, self._library = barrier, barrier.library
        self._known: dict[tuple[int, torch.dtype], Any] = {}

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, how: Reduction) -> bool:
        """As MemoryPath.all_reduce_at_once."""
        native = self._how(how, tensor.dtype)
        if native is None:
            return super().all_reduce_at_once(call, tensor, how)
        if not tensor.is_contiguous():
            return False
        address, count = tensor.data_ptr(), tensor.numel()
        if tensor.nbytes <= PAYLOAD_BYTES:
            self._native.all_reduce(call, self._seconds, address=address, count=count, how=native)
        else:
            self._barrier.meet(call, self._seconds, words=(address, 0))
            first, last = (bound * tensor.itemsize for bound in self._bounds(count))
            self._reduce(_Share(address + first, address + first, first, last - first, ALL, -1), native)
            self._barrier.wait(self._seconds)
        return True

    def _how(self, how: Reduction, dtype: torch.dtype) -> Any:
        """A pointer to the reduction in the library's words; None if it has none for it.

        A bool of torch's can be any byte that is not 0, which only torch makes 1.
        """
        key = how.number, dtype
        try:
            return self._known[key]
        except KeyError:
            words = _Reduction(how.kind, how.operation, self._native.size if how.averages else 1)
            known = byref(words) if dtype != torch.bool and self._library.knows(how.kind) else None
            self._known[key] = known
            return known

    def _reduce_share(self, own: Tensor, target: Tensor | None, offset: int, how: Reduction, *, sent_to: int) -> None:
        native = self._how(how, own.dtype)
        if native is None:
            super()._reduce_share(own, target, offset, how, sent_to=sent_to)
            return
        into = None if target is None else target.data_ptr()
        self._reduce(_Share(own.data_ptr(), into, offset, own.nbytes, sent_to, -1), native)

    def _reduce(self, share: _Share, how: Any) -> None:
        error = self._native.reduce_share(share, how)
        if error:
            next(peer for peer in self._peers if peer.rank == share.culprit).fail(error)


def open_native_barrier(memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]) -> SharedBarrier:
    """One rank's seat at its group's barriers: the library's, where there is one."""
    library = load()
    if library is None:
        return SharedBarrier(memory, rank=rank, size=size, describe=describe)
    return NativeBarrier(library, memory, rank=rank, size=size, describe=describe)


def open_path(barrier: SharedBarrier, seconds: float) -> MemoryPath:
    """One rank's way into the others' memory: the library's, if that took the seat."""
    return NativePath(barrier, seconds) if isinstance(barrier, NativeBarrier) else MemoryPath(barrier, seconds)
