"""Collectives of one host's ranks in one another's memory: what is small travels with the barrier, the kernel copies
the rest from process to process, once.

It takes no thread that waits at full speed, and no place in /dev/shm. The kernel must let the ranks at one another, as
it lets a debugger; where it does not, oneCCL's own way remains. Source: process_vm_readv(2), ptrace(2), prctl(2).
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

CHUNK_BYTES, MOST_BYTES = 512 << 10, 8 << 20
"""What is reduced at a time: a copy of it stays in a core's cache. More where each step waits for Python's lock."""
STARVED_SECONDS = 0.004
"""A step that takes longer waited for a thread that computes in Python, which gives up the lock after 5 ms."""
MOST_VIEWS = 64
"""How many sizes of small tensors are remembered: each costs a result of at most PAYLOAD_BYTES."""
NOBODY, ALL = -1, -2
"""To whom a result is sent, beside a single rank."""
EVEN = 64
"""Ranks share a tensor in multiples of this many elements, so that no two write to one line of a cache."""

COMBINE: dict[int, Callable[..., Any]] = {
    codes.SUM: torch.add,
    codes.PROD: torch.mul,
    codes.MAX: torch.maximum,
    codes.MIN: torch.minimum,
}
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)
YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _function.restype = ctypes.c_ssize_t


class _IoVecEntry(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Peer:
    """Another rank's memory."""

    def __init__(self, rank: int, process: int) -> None:
        self.rank, self._process = rank, process
        self._mine, self._theirs = _IoVecEntry(), _IoVecEntry()
        self._pieces = ctypes.byref(self._mine), ctypes.byref(self._theirs)

    def read(self, address: int, source: int, size: int) -> None:
        """Effect: `size` bytes of the peer's are at the address. Raises: PeerLostError, CclError."""
        self._copy(_libc.process_vm_readv, address, source, size)

    def write(self, address: int, target: int, size: int) -> None:
        """Effect: `size` bytes at the address are the peer's too. Raises: PeerLostError, CclError."""
        self._copy(_libc.process_vm_writev, address, target, size)

    def _copy(self, function: Any, mine: int, theirs: int, size: int) -> None:
        while size > 0:
            self._mine.address, self._theirs.address = mine, theirs
            self._mine.size = self._theirs.size = size
            done = function(self._process, self._pieces[0], 1, self._pieces[1], 1, 0)
            if done <= 0:
                self.fail(ctypes.get_errno())
            mine, theirs, size = mine + done, theirs + done, size - done

    def fail(self, number: int) -> None:
        """Raises: what an errno of reading or writing the memory means: PeerLostError, CclError."""
        if number == errno.ESRCH:
            raise PeerLostError(f"rank {self.rank} of the group (process {self._process}) ended in a collective")
        raise CclError(
            f"the memory of rank {self.rank} of the group (process {self._process}) cannot be reached: "
            f"{os.strerror(number)}\nhint: CPULAUNCH_CCL_PATH=oneccl"
        )


def let_peers_in() -> None:
    """Effect: other processes of this user may reach this one's memory where Yama lets only parents.

    Source: Documentation/admin-guide/LSM/Yama.rst; without effect, and without need, in a kernel that has no Yama.
    """
    try:
        with open(YAMA, encoding="ascii") as file:
            restricted = file.read().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)


def is_permitted(barrier: SharedBarrier, seconds: float, *, call: bytes) -> bool:
    """Whether this rank can read and write the others' memory. Effect: all ranks meet twice."""
    let_peers_in()
    mine = (ctypes.c_uint64 * barrier.size)(*[barrier.rank] * barrier.size)
    barrier.meet(call, seconds, words=(ctypes.addressof(mine), 0))
    found = all(_can_reach(barrier, other) for other in barrier.others)
    barrier.wait(seconds)
    return found and list(mine) == list(range(barrier.size))


def _can_reach(barrier: SharedBarrier, other: int) -> bool:
    peer, mine = Peer(other, barrier.process(other)), ctypes.c_uint64(barrier.rank)
    theirs, size = ctypes.c_uint64(), ctypes.sizeof(ctypes.c_uint64)
    start = barrier.words(other)[0]
    try:
        peer.read(ctypes.addressof(theirs), start + other * size, size)
        peer.write(ctypes.addressof(mine), start + barrier.rank * size, size)
    except CclError:
        return False
    return theirs.value == other


class MemoryPath:
    """One rank's way into the others' memory. Tensors are contiguous; every rank calls the same, in the same order."""

    def __init__(self, barrier: SharedBarrier, seconds: float) -> None:
        self._barrier, self._seconds = barrier, seconds
        # From the next rank on, so that not all read one at a time.
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
        """Effect: returns when all ranks are here."""
        self._barrier.meet(call, self._seconds)

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, how: Reduction) -> bool:
        """Whether the tensor was reduced on the spot, by addresses: a view of a small one costs too much."""
        size, count = tensor.nbytes, tensor.numel()
        if size > PAYLOAD_BYTES or how.averages or not tensor.is_contiguous():
            return False
        turn, address = self._barrier.next_turn, tensor.data_ptr()
        result, parts = self._views(tensor.dtype, count, turn)
        ctypes.memmove(self._addresses[turn], address, size)
        self._barrier.meet(call, self._seconds)
        self._combine(parts, result, how)
        ctypes.memmove(address, result.data_ptr(), size)
        return True

    def all_reduce(self, call: bytes, flat: Tensor, how: Reduction) -> None:
        """Effect: the elements are reduced over all ranks."""
        if flat.nbytes <= PAYLOAD_BYTES:
            self._combine(self._brought(call, flat), flat, how)
            return
        part, offset = self._share(call, flat)
        self._reduce_share(part, part, offset, how, sent_to=ALL)
        self._barrier.wait(self._seconds)

    def reduce(self, call: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Effect: the root's elements are reduced over all ranks; the others' stay as they are."""
        is_root = root == self._barrier.rank
        if flat.nbytes <= PAYLOAD_BYTES:
            parts = self._brought(call, flat)
            if is_root:
                self._combine(parts, flat, how)
            return
        part, offset = self._share(call, flat)
        self._reduce_share(part, part if is_root else None, offset, how, sent_to=root)
        self._barrier.wait(self._seconds)

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, how: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        count, rank = target.numel(), self._barrier.rank
        if source.nbytes <= PAYLOAD_BYTES:
            parts = self._brought(call, source)
            self._combine([part[rank * count : (rank + 1) * count] for part in parts], target, how)
            return
        self._barrier.meet(call, self._seconds, words=(source.data_ptr(), 0))
        part = source[rank * count : (rank + 1) * count]
        self._reduce_share(part, target, rank * target.nbytes, how, sent_to=NOBODY)
        self._barrier.wait(self._seconds)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: the elements are the root's."""
        is_root = root == self._barrier.rank
        pieces = [] if is_root else [(root, 0, flat.data_ptr(), flat.nbytes)]
        self._exchange(call, flat if is_root else None, flat.nbytes, pieces)

    def all_gather(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is all ranks' sources, in their order."""
        self._exchange(call, source, source.nbytes, self._rows(target, source.nbytes))

    def gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the target, which the root alone has, is all ranks' sources, in their order."""
        pieces = [] if target is None else self._rows(target, source.nbytes)
        self._exchange(call, source, source.nbytes, pieces)

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the source, which the root alone has."""
        size = target.nbytes
        pieces = [(root, self._barrier.rank * size, target.data_ptr(), size)]
        self._exchange(call, source, size * self._barrier.size, pieces)

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is what all ranks have for this one, all of the same size."""
        size = source.nbytes // self._barrier.size
        start = self._barrier.rank * size
        pieces = [(rank, start, address, size) for rank, _, address, _ in self._rows(target, size)]
        self._exchange(call, source, source.nbytes, pieces)

    def exchange(self, call: bytes, target: Tensor, source: Tensor, table: Sequence[Sequence[int]]) -> None:
        """Effect: the target is what all ranks have for this one: `table[i][j]` elements from rank i to rank j."""
        rank, unit, address = self._barrier.rank, source.element_size(), target.data_ptr()
        pieces = []
        for other, row in enumerate(table):
            pieces.append((other, sum(row[:rank]) * unit, address, row[rank] * unit))
            address += row[rank] * unit
        self._exchange(call, source, max(sum(row) for row in table) * unit, pieces)

    def _rows(self, target: Tensor, size: int) -> list[tuple[int, int, int, int]]:
        """Each rank's bytes to their place in a row of all ranks'."""
        return [(rank, 0, target.data_ptr() + rank * size, size) for rank in range(self._barrier.size)]

    def _exchange(
        self, call: bytes, source: Tensor | None, most: int, pieces: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """Effect: each piece of a rank's source (rank, offset, address, size in bytes) is at its address.

        `most` is the size in bytes of the largest source; all ranks give the same.
        """
        if most <= PAYLOAD_BYTES:
            parts = self._brought(call, source)
            for rank, offset, address, size in pieces:
                ctypes.memmove(address, parts[rank].data_ptr() + offset, size)
            return
        start = 0 if source is None else source.data_ptr()
        self._barrier.meet(call, self._seconds, words=(start, 0))
        for rank, offset, address, size in pieces:
            if rank == self._barrier.rank:
                ctypes.memmove(address, start + offset, size)
        for peer in self._peers:
            for rank, offset, address, size in pieces:
                if rank == peer.rank:
                    peer.read(address, self._barrier.words(rank)[0] + offset, size)
        self._barrier.wait(self._seconds)

    def _brought(self, call: bytes, flat: Tensor | None) -> list[Tensor]:
        """What the ranks have brought to this barrier, each as elements of the same type and number."""
        turn = self._barrier.next_turn
        if flat is not None:
            ctypes.memmove(self._addresses[turn], flat.data_ptr(), flat.nbytes)
        self._barrier.meet(call, self._seconds)
        if flat is None:
            return [parts[turn] for parts in self._payloads]
        return [parts[: flat.numel()] for parts in self._payloads_of(flat.dtype)[turn]]

    def _payloads_of(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """All ranks' payloads of each turn, as elements of a type."""
        if dtype not in self._typed:
            typed = [[part.view(dtype) for part in parts] for parts in self._payloads]
            self._typed[dtype] = [parts[0] for parts in typed], [parts[1] for parts in typed]
        return self._typed[dtype]

    def _views(self, dtype: torch.dtype, count: int, turn: int) -> tuple[Tensor, list[Tensor]]:
        """Room for a result, and all ranks' payloads of a turn, as so many elements of a type."""
        known = self._viewed.get((dtype, count, turn))
        if known is None:
            if len(self._viewed) >= MOST_VIEWS:
                self._viewed.clear()
            parts = [part[:count] for part in self._payloads_of(dtype)[turn]]
            with torch.inference_mode(False):  # The program may be in that mode now, and no more when it comes again.
                result = torch.empty(count, dtype=dtype, device="cpu")
            known = self._viewed[dtype, count, turn] = result, parts
        return known

    def _combine(self, parts: Sequence[Tensor], target: Tensor, how: Reduction) -> None:
        """Effect: the target is the reduction of all ranks' parts, in the order of the ranks."""
        combine, first = COMBINE[how.operation], parts[0]
        for part in parts[1:]:
            combine(first, part, out=target)
            first = target
        if len(parts) == 1:
            target.copy_(first)
        how.finish(target, self._barrier.size)

    def _combine_peers(self, mine: Tensor, target: Tensor, starts: Sequence[tuple[Peer, int]], how: Reduction) -> None:
        """Effect: the target is the reduction of this rank's elements and the peers' that start at the addresses."""
        combine, scratch = COMBINE[how.operation], self._scratch_like(mine)
        for peer, start in starts:
            peer.read(scratch.data_ptr(), start, scratch.nbytes)
            combine(mine, scratch, out=target)
            mine = target
        if mine is not target:
            target.copy_(mine)
        how.finish(target, self._barrier.size)

    def _scratch_like(self, part: Tensor) -> Tensor:
        """Room for as many elements: always the same memory, which stays in a core's cache."""
        key = part.dtype, part.numel()
        known = self._scratches.get(key)
        if known is None:
            if self._scratch.nbytes < part.nbytes or len(self._scratches) >= MOST_VIEWS:
                self._scratches.clear()
                self._scratch = torch.empty(max(part.nbytes, self._scratch.nbytes), dtype=torch.uint8, device="cpu")
            known = self._scratches[key] = self._scratch[: part.nbytes].view(part.dtype)
        return known

    def _share(self, call: bytes, flat: Tensor) -> tuple[Tensor, int]:
        """This rank's part of what all share, and where that begins, in bytes. Effect: all ranks meet."""
        self._barrier.meet(call, self._seconds, words=(flat.data_ptr(), 0))
        first, last = self._bounds(flat.numel())
        return flat[first:last], first * flat.element_size()

    def _bounds(self, count: int) -> tuple[int, int]:
        """Of this rank's part of so many elements."""
        rank, size = self._barrier.rank, self._barrier.size
        first, last = (min(count, -(-count * each // size // EVEN) * EVEN) for each in (rank, rank + 1))
        return first, last if rank + 1 < size else count

    def _reduce_share(self, own: Tensor, target: Tensor | None, offset: int, how: Reduction, *, sent_to: int) -> None:
        """Effect: the target, and what the rank `sent_to` has there (ALL: every rank's), is the reduction of all ranks'
        elements that begin so many bytes after what each told at the barrier; `own` are this rank's.
        """
        unit, first = own.element_size(), 0
        bases = [(peer, self._barrier.words(peer.rank)[0] + offset) for peer in self._peers]
        while first < own.numel():
            begun = time.monotonic()
            span = slice(first, min(own.numel(), first + self._chunk_bytes // unit))
            starts = [(peer, base + first * unit) for peer, base in bases]
            result = torch.empty_like(own[span]) if target is None else target[span]
            self._combine_peers(own[span], result, starts, how)
            for peer, start in starts:
                if sent_to in (ALL, peer.rank):
                    peer.write(result.data_ptr(), start, result.nbytes)
            if time.monotonic() - begun > STARVED_SECONDS:
                self._chunk_bytes = min(2 * self._chunk_bytes, MOST_BYTES)
            first = span.stop

    def close(self) -> None:
        """Effect: none: what there is goes with the object."""
