"""The memory path: collectives of ranks on one host, which read and write each other's memory.

Small tensors are copied through the barrier's shared memory. The kernel copies larger ones once, from process to
process. An all-reduce of a large tensor runs in three steps: at the barrier each rank publishes the tensor's address;
each rank reduces its share of the elements and writes the result into every other rank's tensor; at a second barrier
the ranks wait until all shares are written.

The path needs no busy thread and no space in /dev/shm. The kernel must permit the ranks to access each other's memory,
as it does for a debugger; otherwise the group uses oneCCL. Source: process_vm_readv(2), ptrace(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

import torch

from cpulaunch.worker.ccl.memory.shared_barrier import PAYLOAD_BYTES, SharedBarrier
from cpulaunch.worker.ccl.wire import codes
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.wire.reductions import Reduction

CHUNK_BYTES, MAX_CHUNK_BYTES = 512 << 10, 8 << 20
"""Bytes reduced at a time: a copy fits into a core's cache. Chunks grow where each waits for the interpreter lock."""
STARVED_SECONDS = 0.004
"""A chunk that takes longer has waited for another Python thread, which releases the interpreter lock after 5 ms."""
MAX_VIEWS = 64
"""Sizes of small tensors whose views are cached; each takes at most PAYLOAD_BYTES of memory."""
ALIGNED_ELEMENTS = 64
"""A rank's share of a tensor is a multiple of so many elements, so that no two ranks write to the same cache line."""

REDUCERS: dict[int, Callable[..., Any]] = {
    codes.SUM: torch.add,
    codes.PROD: torch.mul,
    codes.MAX: torch.maximum,
    codes.MIN: torch.minimum,
}
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _function.restype = ctypes.c_ssize_t


class _IoVecEntry(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Peer:
    """Access to the memory of another rank's process."""

    def __init__(self, rank: int, process: int) -> None:
        self.rank, self._process = rank, process
        self._mine, self._theirs = _IoVecEntry(), _IoVecEntry()
        self._pieces = ctypes.byref(self._mine), ctypes.byref(self._theirs)

    def read(self, address: int, source: int, size: int) -> None:
        """Effect: copies `size` bytes from the peer's address `source`. Raises: PeerLostError, CclError."""
        self._copy(_libc.process_vm_readv, address, source, size)

    def write(self, address: int, target: int, size: int) -> None:
        """Effect: copies `size` bytes to the peer's address `target`. Raises: PeerLostError, CclError."""
        self._copy(_libc.process_vm_writev, address, target, size)

    def _copy(self, function: Any, mine: int, theirs: int, size: int) -> None:
        while size > 0:
            self._mine.address, self._theirs.address = mine, theirs
            self._mine.size = self._theirs.size = size
            done = function(self._process, self._pieces[0], 1, self._pieces[1], 1, 0)
            if done <= 0:
                self.raise_error(ctypes.get_errno())
            mine, theirs, size = mine + done, theirs + done, size - done

    def raise_error(self, number: int) -> None:
        """Raises: PeerLostError if the errno of a failed access says that the process has exited, else CclError."""
        if number == errno.ESRCH:
            raise PeerLostError(f"rank {self.rank} of the group (process {self._process}) exited during a collective")
        raise CclError(
            f"cannot access the memory of rank {self.rank} of the group (process {self._process}): "
            f"{os.strerror(number)}\nhint: set CPULAUNCH_CCL_PATH=oneccl"
        )


def allow_ptrace() -> None:
    """Effect: processes of the same user may access this one's memory where Yama would permit its parents only.

    Does nothing where Yama has no such restriction. Source: Documentation/admin-guide/LSM/Yama.rst.
    """
    try:
        with open(YAMA, encoding="ascii") as file:
            restricted = file.read().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def can_access_all(barrier: SharedBarrier, seconds: float, *, call: bytes) -> bool:
    """Whether this rank can read and write the memory of every other rank.

    Every rank of the group must call it. Effect: passes two barriers. Raises: PeerLostError.
    """
    allow_ptrace()
    mine = (ctypes.c_uint64 * barrier.size)(*[barrier.rank] * barrier.size)
    barrier.synchronize(call, seconds, values=(ctypes.addressof(mine), 0))
    found = all(_can_access(barrier, other) for other in barrier.others)
    barrier.wait(seconds)
    return found and list(mine) == list(range(barrier.size))


def _can_access(barrier: SharedBarrier, other: int) -> bool:
    peer, mine = Peer(other, barrier.process(other)), ctypes.c_uint64(barrier.rank)
    theirs, size = ctypes.c_uint64(), ctypes.sizeof(ctypes.c_uint64)
    start = barrier.values(other)[0]
    try:
        peer.read(ctypes.addressof(theirs), start + other * size, size)
        peer.write(ctypes.addressof(mine), start + barrier.rank * size, size)
    except CclError:
        return False
    return theirs.value == other


class MemoryPath:
    """A rank's collectives through the memory of the other ranks.

    Every rank of the group calls the same methods in the same order. Tensors are contiguous; `call` is the packed call
    that the ranks compare. Raises, from every method: RanksDisagreeError, PeerLostError, CclError.
    """

    def __init__(self, barrier: SharedBarrier, seconds: float) -> None:
        self._barrier, self._seconds = barrier, seconds
        # Starting with the next rank, so that the ranks do not all read from the same one.
        others = [(barrier.rank + step) % barrier.size for step in range(1, barrier.size)]
        self._peers = [Peer(other, barrier.process(other)) for other in others]
        self._payloads = [
            [torch.frombuffer(view, dtype=torch.uint8) for view in barrier.payloads(rank)]
            for rank in range(barrier.size)
        ]
        self._addresses = [part.data_ptr() for part in self._payloads[barrier.rank]]
        self._typed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._viewed: dict[tuple[torch.dtype, int, int], tuple[Tensor, list[Tensor]]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratches: dict[tuple[torch.dtype, int], Tensor] = {}
        self._chunk_bytes = CHUNK_BYTES

    def barrier(self, call: bytes) -> None:
        """Effect: returns when all ranks have called it."""
        self._barrier.synchronize(call, self._seconds)

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, reduction: Reduction) -> bool:
        """Whether the tensor could be reduced directly; if not, `all_reduce` must be called.

        For a small tensor this saves the views that `all_reduce` needs, which take longer than the reduction.
        """
        size, count = tensor.nbytes, tensor.numel()
        if size > PAYLOAD_BYTES or reduction.averages or not tensor.is_contiguous():
            return False
        parity, address = self._barrier.next_parity, tensor.data_ptr()
        result, parts = self._views(tensor.dtype, count, parity)
        ctypes.memmove(self._addresses[parity], address, size)
        self._barrier.synchronize(call, self._seconds)
        self._reduce_parts(parts, result, reduction)
        ctypes.memmove(address, result.data_ptr(), size)
        return True

    def all_reduce(self, call: bytes, flat: Tensor, reduction: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        if flat.nbytes <= PAYLOAD_BYTES:
            self._reduce_parts(self._exchange_payloads(call, flat), flat, reduction)
            return
        part, offset = self._share(call, flat)
        self._reduce_share(part, part, offset, reduction, recipients=self._barrier.others)
        self._barrier.wait(self._seconds)

    def reduce(self, call: bytes, flat: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's tensor is reduced over all ranks; those of other ranks do not change."""
        is_root = root == self._barrier.rank
        if flat.nbytes <= PAYLOAD_BYTES:
            parts = self._exchange_payloads(call, flat)
            if is_root:
                self._reduce_parts(parts, flat, reduction)
            return
        part, offset = self._share(call, flat)
        self._reduce_share(part, part if is_root else None, offset, reduction, recipients=(root,))
        self._barrier.wait(self._seconds)

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        count, rank = target.numel(), self._barrier.rank
        if source.nbytes <= PAYLOAD_BYTES:
            parts = self._exchange_payloads(call, source)
            self._reduce_parts([part[rank * count : (rank + 1) * count] for part in parts], target, reduction)
            return
        self._barrier.synchronize(call, self._seconds, values=(source.data_ptr(), 0))
        part = source[rank * count : (rank + 1) * count]
        self._reduce_share(part, target, rank * target.nbytes, reduction, recipients=())
        self._barrier.wait(self._seconds)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: the root's tensor is copied to all ranks."""
        is_root = root == self._barrier.rank
        pieces = [] if is_root else [(root, 0, flat.data_ptr(), flat.nbytes)]
        self._exchange(call, flat if is_root else None, flat.nbytes, pieces)

    def all_gather(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target holds the sources of all ranks, in rank order."""
        self._exchange(call, source, source.nbytes, self._rows(target, source.nbytes))

    def gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the root's target holds the sources of all ranks, in rank order. It is None in other ranks."""
        pieces = [] if target is None else self._rows(target, source.nbytes)
        self._exchange(call, source, source.nbytes, pieces)

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the root's source, which is None in other ranks."""
        size = target.nbytes
        pieces = [(root, self._barrier.rank * size, target.data_ptr(), size)]
        self._exchange(call, source, size * self._barrier.size, pieces)

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target holds the parts of all ranks' sources for this rank, all of the same size."""
        size = source.nbytes // self._barrier.size
        start = self._barrier.rank * size
        pieces = [(rank, start, address, size) for rank, _, address, _ in self._rows(target, size)]
        self._exchange(call, source, source.nbytes, pieces)

    def exchange(self, call: bytes, target: Tensor, source: Tensor, table: Sequence[Sequence[int]]) -> None:
        """Effect: the target holds the parts of all ranks' sources for this rank.

        `table[i][j]` is the number of elements from rank i to rank j.
        """
        rank, unit, address = self._barrier.rank, source.element_size(), target.data_ptr()
        pieces = []
        for other, row in enumerate(table):
            pieces.append((other, sum(row[:rank]) * unit, address, row[rank] * unit))
            address += row[rank] * unit
        self._exchange(call, source, max(sum(row) for row in table) * unit, pieces)

    def _rows(self, target: Tensor, size: int) -> list[tuple[int, int, int, int]]:
        """For each rank, a piece of `size` bytes: (rank, offset in its source, address in the target, size)."""
        return [(rank, 0, target.data_ptr() + rank * size, size) for rank in range(self._barrier.size)]

    def _exchange(
        self, call: bytes, source: Tensor | None, most: int, pieces: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Effect: copies each piece (rank, offset in its source, address, size in bytes) to its address.

        `most` is the size in bytes of the largest source, and the same in all ranks.
        """
        if most <= PAYLOAD_BYTES:
            parts = self._exchange_payloads(call, source)
            for rank, offset, address, size in pieces:
                ctypes.memmove(address, parts[rank].data_ptr() + offset, size)
            return
        start = 0 if source is None else source.data_ptr()
        self._barrier.synchronize(call, self._seconds, values=(start, 0))
        for rank, offset, address, size in pieces:
            if rank == self._barrier.rank:
                ctypes.memmove(address, start + offset, size)
        for peer in self._peers:
            for rank, offset, address, size in pieces:
                if rank == peer.rank:
                    peer.read(address, self._barrier.values(rank)[0] + offset, size)
        self._barrier.wait(self._seconds)

    def _exchange_payloads(self, call: bytes, flat: Tensor | None) -> list[Tensor]:
        """The small tensors of all ranks, as views of shared memory, after a barrier; `flat` is this rank's."""
        parity = self._barrier.next_parity
        if flat is not None:
            ctypes.memmove(self._addresses[parity], flat.data_ptr(), flat.nbytes)
        self._barrier.synchronize(call, self._seconds)
        if flat is None:
            return [parts[parity] for parts in self._payloads]
        return [parts[: flat.numel()] for parts in self._payloads_of(flat.dtype)[parity]]

    def _payloads_of(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Views of all ranks' payloads as elements of a type, for barriers of even and of odd number."""
        if dtype not in self._typed:
            typed = [[part.view(dtype) for part in parts] for parts in self._payloads]
            self._typed[dtype] = [parts[0] for parts in typed], [parts[1] for parts in typed]
        return self._typed[dtype]

    def _views(self, dtype: torch.dtype, count: int, parity: int) -> tuple[Tensor, list[Tensor]]:
        """An uninitialised result, and views of all ranks' payloads of a parity: `count` elements each."""
        known = self._viewed.get((dtype, count, parity))
        if known is None:
            if len(self._viewed) >= MAX_VIEWS:
                self._viewed.clear()
            parts = [part[:count] for part in self._payloads_of(dtype)[parity]]
            with torch.inference_mode(False):  # The result is reused, perhaps outside inference mode.
                result = torch.empty(count, dtype=dtype, device="cpu")
            known = self._viewed[dtype, count, parity] = result, parts
        return known

    def _reduce_parts(self, parts: Sequence[Tensor], target: Tensor, reduction: Reduction) -> None:
        """Effect: the target is the reduction of all ranks' parts, in rank order."""
        combine, first = REDUCERS[reduction.operation], parts[0]
        for part in parts[1:]:
            combine(first, part, out=target)
            first = target
        if len(parts) == 1:
            target.copy_(first)
        reduction.finish(target, self._barrier.size)

    def _reduce_peers(
        self, mine: Tensor, target: Tensor, starts: Sequence[tuple[Peer, int]], reduction: Reduction
    ) -> None:
        """Effect: the target is the reduction of this rank's elements and of those at the peers' addresses."""
        combine, scratch = REDUCERS[reduction.operation], self._scratch_like(mine)
        for peer, start in starts:
            peer.read(scratch.data_ptr(), start, scratch.nbytes)
            combine(mine, scratch, out=target)
            mine = target
        if mine is not target:
            target.copy_(mine)
        reduction.finish(target, self._barrier.size)

    def _scratch_like(self, part: Tensor) -> Tensor:
        """A scratch tensor like `part`: always the same memory, which stays in a core's cache."""
        key = part.dtype, part.numel()
        known = self._scratches.get(key)
        if known is None:
            if self._scratch.nbytes < part.nbytes or len(self._scratches) >= MAX_VIEWS:
                self._scratches.clear()
                self._scratch = torch.empty(max(part.nbytes, self._scratch.nbytes), dtype=torch.uint8, device="cpu")
            known = self._scratches[key] = self._scratch[: part.nbytes].view(part.dtype)
        return known

    def _share(self, call: bytes, flat: Tensor) -> tuple[Tensor, int]:
        """This rank's share of the tensor, and its offset in bytes. Effect: publishes the tensor at a barrier."""
        self._barrier.synchronize(call, self._seconds, values=(flat.data_ptr(), 0))
        first, last = self._bounds(flat.numel())
        return flat[first:last], first * flat.element_size()

    def _bounds(self, count: int) -> tuple[int, int]:
        """First index of this rank's share of `count` elements, and the index after its last."""
        rank, size = self._barrier.rank, self._barrier.size
        first, last = (
            min(count, -(-count * each // size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS) for each in (rank, rank + 1)
        )
        return first, last if rank + 1 < size else count

    def _reduce_share(
        self, own: Tensor, target: Tensor | None, offset: int, reduction: Reduction, *, recipients: Sequence[int]
    ) -> None:
        """Effect: this rank's share is reduced over all ranks, into the target and into the recipients' tensors.

        `own` are this rank's elements; those of other ranks begin `offset` bytes after the address that each has
        published at the barrier. `recipients` are no rank, one, or all others.
        """
        unit, first = own.element_size(), 0
        bases = [(peer, self._barrier.values(peer.rank)[0] + offset) for peer in self._peers]
        while first < own.numel():
            begun = time.monotonic()
            span = slice(first, min(own.numel(), first + self._chunk_bytes // unit))
            starts = [(peer, base + first * unit) for peer, base in bases]
            result = torch.empty_like(own[span]) if target is None else target[span]
            self._reduce_peers(own[span], result, starts, reduction)
            for peer, start in starts:
                if peer.rank in recipients:
                    peer.write(result.data_ptr(), start, result.nbytes)
            if time.monotonic() - begun > STARVED_SECONDS:
                self._chunk_bytes = min(2 * self._chunk_bytes, MAX_CHUNK_BYTES)
            first = span.stop

    def close(self) -> None:
        """Effect: none: all memory is freed with the object."""
