"""The shared barrier and the reductions of the memory path, by the compiled library cpulaunch/lib/ccl_memory.c.

Its calls take microseconds where the Python code takes tens of them, and release Python's interpreter lock. The library
is optional: `open_native_barrier` and `open_path` return the pure Python classes where cpulaunch was installed without
a C compiler. A group may mix ranks of both kinds.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_uint32, c_uint64, c_void_p

import torch

from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.memory.shared_barrier import (
    PAYLOAD_BYTES,
    POLL_SECONDS,
    SharedBarrier,
)
from cpulaunch.worker.ccl.wire.errors import RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.wire.reductions import Reduction

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
LIBRARY = os.path.join(PACKAGE, MEMORY_LIBRARY)
SPIN_SECONDS = 50e-6
"""Time that a rank spins before it sleeps: ranks with equal work usually arrive within it."""
CHUNK_BYTES = 256 << 10
"""Bytes reduced at a time: the own chunk and a peer's fit into a core's cache."""
_ROUND = 0xFFFFFFFF


class _RankMemory(Structure):
    """struct rank_memory: the addresses of a rank's slot and of its two payloads."""

    _fields_ = (("slot", c_void_p), ("payloads", c_void_p * 2))


class _NativeBarrier(Structure):
    """struct barrier: one rank's view of its group's barrier."""

    _fields_ = (
        ("ranks", POINTER(_RankMemory)),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("spin_nanoseconds", c_uint64),
        ("poll_nanoseconds", c_uint64),
        ("scratch", c_void_p),
        ("chunk_bytes", c_uint64),
    )


class _NativeReduction(Structure):
    """struct reduction: oneCCL's numbers for the type and the operation, and what the result is divided by."""

    _fields_ = (("type", c_int32), ("operation", c_int32), ("divisor", c_uint32))


_NO_RANK, _ALL_OTHERS = -1, -2
"""Values of a share's `recipient` besides a rank, as in ccl_memory.c."""


class _Share(Structure):
    """struct share: the part of a tensor that one rank reduces, and the rank that also receives the result."""

    _fields_ = (
        ("own", c_void_p),
        ("target", c_void_p),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("recipient", c_int32),
        ("failed_rank", c_int32),
    )


_BARRIER_AND_NUMBER = (c_void_p, c_uint32)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "version": (),
    "knows": (c_int,),
    "await": _BARRIER_AND_NUMBER,
    "wait": _BARRIER_AND_NUMBER,
    "compare": _BARRIER_AND_NUMBER,
    "meet": (*_BARRIER_AND_NUMBER, ctypes.c_char_p, c_uint64, c_uint64),
    "all_reduce_small": (*_BARRIER_AND_NUMBER, ctypes.c_char_p, c_void_p, c_uint64, c_void_p),
    "reduce_brought": (*_BARRIER_AND_NUMBER, c_void_p, c_uint64, c_void_p),
    "reduce_share": (*_BARRIER_AND_NUMBER, c_void_p, c_void_p),
}
"""Function, without its prefix cpulaunch_ccl_ -> its arguments' types; each returns an int."""


class NativeLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: str) -> None:
        """Raises: OSError if the file cannot be loaded; AttributeError if it lacks a function."""
        loaded = ctypes.CDLL(path)
        functions = {name: loaded[f"cpulaunch_ccl_{name}"] for name in PROTOTYPES}
        for name, arguments in PROTOTYPES.items():
            functions[name].argtypes = arguments
        self.version, self.supports = functions["version"], functions["knows"]
        self.await_, self.wait = functions["await"], functions["wait"]
        self.compare, self.synchronize = functions["compare"], functions["meet"]
        self.all_reduce_small, self.reduce_payloads = functions["all_reduce_small"], functions["reduce_brought"]
        self.reduce_share = functions["reduce_share"]


def load(path: str = LIBRARY) -> NativeLibrary | None:
    """The library; None if cpulaunch was installed without it, or if it is of another version."""
    try:
        library = NativeLibrary(path)
    except (OSError, AttributeError):
        return None
    return library if library.version() == MEMORY_LIBRARY_VERSION else None


class NativeBarrier(SharedBarrier):
    """A SharedBarrier whose waiting and comparing is done by the compiled library."""

    def __init__(
        self, library: NativeLibrary, memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]
    ) -> None:
        super().__init__(memory, rank=rank, size=size, describe=describe)
        self.library = library
        scratch = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        payloads = [
            [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in self.payloads(r)] for r in range(size)
        ]
        ranks = (_RankMemory * size)(
            *[_RankMemory(ctypes.addressof(self._slots[r]), (c_void_p * 2)(*payloads[r])) for r in range(size)]
        )
        self._kept_alive = scratch, ranks
        self._native = _NativeBarrier(
            ranks=ranks,
            rank=rank,
            size=size,
            spin_nanoseconds=int(SPIN_SECONDS * 1e9),
            poll_nanoseconds=int(POLL_SECONDS * 1e9),
            scratch=scratch.data_ptr(),
            chunk_bytes=CHUNK_BYTES,
        )
        self._pointer = byref(self._native)

    def disable_spinning(self) -> None:
        """Effect: as SharedBarrier.disable_spinning."""
        self._native.spin_nanoseconds = 0

    def synchronize(self, call: bytes, seconds: float, *, values: tuple[int, int] = (0, 0)) -> None:
        """Effect: as SharedBarrier.synchronize."""
        self._number = number = self._number + 1 & _ROUND
        state = self.library.synchronize(self._pointer, number, call, *values)
        if state:
            self._complete(state, call, seconds)

    def wait(self, seconds: float) -> None:
        """Effect: as SharedBarrier.wait."""
        self._number = number = self._number + 1 & _ROUND
        late = self.library.wait(self._pointer, number)
        if late:
            self._wait_for_late_ranks(late, seconds)

    def all_reduce(self, call: bytes, seconds: float, *, address: int, count: int, reduction: Any) -> None:
        """Effect: the `count` elements at the address are reduced over all ranks. Raises: as synchronize.

        They must fit into a payload.
        """
        self._number = number = self._number + 1 & _ROUND
        state = self.library.all_reduce_small(self._pointer, number, call, address, count, reduction)
        if state:
            self._complete(state, call, seconds)
            self.library.reduce_payloads(self._pointer, number, address, count, reduction)

    def reduce_share(self, share: _Share, reduction: Any) -> int:
        """0, or the errno of a failed access to the memory of rank `share.failed_rank`."""
        return int(self.library.reduce_share(self._pointer, self._number, byref(share), reduction))

    def _complete(self, state: int, call: bytes, seconds: float) -> None:
        """Effect: as synchronize, whose native function returned the non-zero `state`.

        It is 1 + the number of a late rank, or -1 - the number of a rank that runs another call.
        """
        if state > 0:
            self._wait_for_late_ranks(state, seconds)
            state = self.library.compare(self._pointer, self._number)
        if state < 0:
            other = -1 - state
            theirs = bytes(self._announcements[other][self._number & 1].call)
            raise RanksDisagreeError(self._disagreement(call, other, theirs))

    def _wait_for_late_ranks(self, late: int, seconds: float) -> None:
        """Effect: returns when all ranks have reached the barrier. Raises: PeerLostError.

        `late` is 1 + the number of a rank that had not.
        """
        deadline = time.monotonic() + seconds
        while late:
            other = late - 1
            departure = self._departure(other)  # Read before the count: the rank may arrive and leave in between.
            has_arrived = self._has_arrived(other, self._number)
            if departure and not has_arrived:
                raise self._lost_error(other, departure)
            if time.monotonic() > deadline and not has_arrived:
                raise self._timeout_error(other, seconds)
            late = self.library.await_(self._pointer, self._number)


class NativePath(MemoryPath):
    """A MemoryPath whose reductions are done by the compiled library."""

    def __init__(self, barrier: NativeBarrier, seconds: float) -> None:
        super().__init__(barrier, seconds)
        self._native, self._library = barrier, barrier.library
        self._known: dict[tuple[int, torch.dtype], Any] = {}

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, reduction: Reduction) -> bool:
        """As MemoryPath.all_reduce_at_once, for tensors of any size."""
        native = self._native_reduction(reduction, tensor.dtype)
        if native is None:
            return super().all_reduce_at_once(call, tensor, reduction)
        if not tensor.is_contiguous():
            return False
        address, count = tensor.data_ptr(), tensor.numel()
        if tensor.nbytes <= PAYLOAD_BYTES:
            self._native.all_reduce(call, self._seconds, address=address, count=count, reduction=native)
        else:
            self._barrier.synchronize(call, self._seconds, values=(address, 0))
            first, last = (bound * tensor.itemsize for bound in self._bounds(count))
            self._reduce(_Share(address + first, address + first, first, last - first, _ALL_OTHERS, _NO_RANK), native)
            self._barrier.wait(self._seconds)
        return True

    def _native_reduction(self, reduction: Reduction, dtype: torch.dtype) -> Any:
        """A pointer to the library's form of the reduction; None if the library does not support it.

        It supports no bools: in torch's, every byte but 0 is true, and only torch's own operations make it 1.
        """
        key = reduction.number, dtype
        try:
            return self._known[key]
        except KeyError:
            native = _NativeReduction(
                reduction.kind, reduction.operation, self._native.size if reduction.averages else 1
            )
            known = byref(native) if dtype != torch.bool and self._library.supports(reduction.kind) else None
            self._known[key] = known
            return known

    def _reduce_share(
        self, own: Tensor, target: Tensor | None, offset: int, reduction: Reduction, *, recipients: Sequence[int]
    ) -> None:
        native = self._native_reduction(reduction, own.dtype)
        if native is None:
            super()._reduce_share(own, target, offset, reduction, recipients=recipients)
            return
        result = None if target is None else target.data_ptr()
        recipient = _recipient_code(recipients)
        self._reduce(_Share(own.data_ptr(), result, offset, own.nbytes, recipient, _NO_RANK), native)

    def _reduce(self, share: _Share, reduction: Any) -> None:
        error = self._native.reduce_share(share, reduction)
        if error:
            next(peer for peer in self._peers if peer.rank == share.failed_rank).raise_error(error)


def _recipient_code(ranks: Sequence[int]) -> int:
    """A share's `recipient`, for no rank, for one, or for all other ranks."""
    if len(ranks) > 1:
        return _ALL_OTHERS
    return ranks[0] if ranks else _NO_RANK


def open_native_barrier(memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]) -> SharedBarrier:
    """One rank's view of its group's barrier: native where the compiled library is installed."""
    library = load()
    if library is None:
        return SharedBarrier(memory, rank=rank, size=size, describe=describe)
    return NativeBarrier(library, memory, rank=rank, size=size, describe=describe)


def open_path(barrier: SharedBarrier, seconds: float) -> MemoryPath:
    """The memory path over a barrier: native if the barrier is."""
    return NativePath(barrier, seconds) if isinstance(barrier, NativeBarrier) else MemoryPath(barrier, seconds)
