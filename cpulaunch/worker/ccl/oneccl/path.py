"""Collectives over oneCCL, between hosts or if ranks may not share memory."""

from __future__ import annotations

import ctypes

import torch

from cpulaunch.worker.ccl.wire import codes
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import describe_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpulaunch.worker.ccl.oneccl.api import Communicator
    from cpulaunch.worker.ccl.oneccl.peers import PeerConnections
    from cpulaunch.worker.ccl.wire.reductions import Reduction

_WIDE_BYTES = 8
PIECE_BYTES = 8 << 20
"""Size of the pieces of an all-reduce or a broadcast between hosts over TCP. Between two hosts, 24 and 96 MiB took a
third of the time in such pieces. Gather, scatter and all-to-all took longer, as their pieces need additional copies."""
LOST_PEER_SECONDS = 1.0
"""Time to wait for the notice that names the exited rank, after oneCCL has lost a connection."""
MISMATCH = "the ranks' collectives do not match"


def _count_and_type(tensor: Tensor, parts: int = 1) -> tuple[int, int]:
    """Number of elements and oneCCL's number of the integer type that move the bytes of one part of a tensor.

    A collective that only moves data does not depend on the tensor's own type.
    """
    size = tensor.nbytes // parts
    return (size // _WIDE_BYTES, codes.UINT64) if size % _WIDE_BYTES == 0 else (size, codes.UINT8)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """The elements in order, in pieces of at most PIECE_BYTES."""
    return flat.split(PIECE_BYTES // flat.element_size()) if flat.nbytes > PIECE_BYTES else (flat,)


class OnecclPath:
    """One rank's collectives over a communicator.

    Tensors are contiguous; all ranks call the same methods in the same order. Before each collective they exchange
    their packed calls, because oneCCL computes wrong results from calls that do not match. It costs one round trip.
    Raises, from every method: RanksDisagreeError in all ranks if the calls do not match; CclError.
    """

    def __init__(self, communicator: Communicator, peers: PeerConnections, *, size: int) -> None:
        self._communicator, self._peers, self._size = communicator, peers, size
        self._mine, self._calls = (ctypes.create_string_buffer(CALL.size * rows) for rows in (1, size))
        self._addresses = ctypes.addressof(self._mine), ctypes.addressof(self._calls)
        self.leave, self.close = peers.leave, communicator.close

    def lost_peer(self) -> tuple[int, int] | None:
        """Rank and process id of a peer that is known to have exited or left; None otherwise."""
        return self._peers.lost_peer(LOST_PEER_SECONDS if self._communicator.has_failed else 0)

    def set_timeout(self, seconds: float) -> None:
        """Effect: none: oneCCL has no timeout, so those who wait for a collective have one."""

    def _run(self, function: str, source: Tensor, target: Tensor, *numbers: int) -> None:
        """Effect: runs oneCCL's function if the tensors have elements.

        Its numbers: count, type, and reduction and root if it has them.
        """
        if numbers[0]:
            self._communicator.run(function, source.data_ptr(), target.data_ptr(), *numbers)

    def barrier(self, call: bytes) -> None:
        """Effect: returns when all ranks are about to run this call."""
        self._mine.raw = call
        self._communicator.run("AllGather", *self._addresses, CALL.size // _WIDE_BYTES, codes.UINT64)
        calls = [self._calls.raw[at : at + CALL.size] for at in range(0, CALL.size * self._size, CALL.size)]
        other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
        if other is not None:
            first, second = describe_call(calls[0]), describe_call(calls[other])
            raise RanksDisagreeError(f"{MISMATCH}: rank 0 calls {first}, rank {other} calls {second}")

    def all_reduce(self, call: bytes, tensor: Tensor, reduction: Reduction) -> None:
        """Effect: the elements are reduced over all ranks."""
        self.barrier(call)
        with torch.inference_mode():
            flat = tensor.data.view(-1)
            for piece in _pieces(flat):
                self._run("AllReduce", piece, piece, piece.numel(), reduction.kind, reduction.operation)
            reduction.finish(flat, self._size)

    def reduce(self, call: bytes, flat: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's elements are reduced over all ranks; those of other ranks do not change."""
        self.barrier(call)
        # oneCCL overwrites the buffers of the other ranks too.
        row = flat if self._communicator.rank == root else flat.clone()
        self._run("Reduce", row, row, row.numel(), reduction.kind, reduction.operation, root)
        if row is flat:
            reduction.finish(flat, self._size)

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the sources, reduced over all ranks."""
        self.barrier(call)
        self._run("ReduceScatter", source, target, target.numel(), reduction.kind, reduction.operation)
        reduction.finish(target, self._size)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: copies the root's elements to all ranks."""
        self.barrier(call)
        for piece in _pieces(flat):
            self._run("Broadcast", piece, piece, *_count_and_type(piece), root)

    def all_gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the target, if this rank has one, is the sources of all ranks, in rank order."""
        self.barrier(call)
        whole = source.new_empty(self._size * source.numel()) if target is None else target
        self._run("AllGather", source, whole, *_count_and_type(source))

    gather = all_gather  # oneCCL has none: all ranks receive all sources.

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the root's source; only the root has a source.

        oneCCL has no scatter: all ranks receive the whole source.
        """
        count, rank = target.numel(), self._communicator.rank
        whole = target.new_empty(self._size * count) if source is None else source
        self.broadcast(call, whole, root=root)
        target.copy_(whole[rank * count : (rank + 1) * count])

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor, splits: Sequence[Sequence[int]]) -> None:
        """Effect: the target is the parts for this rank of all sources, in rank order.

        `splits` are the numbers of elements for each rank, and from each. Every part is padded to the largest.
        """
        self.barrier(call)
        table = self._agreed_table(splits)
        rank, most = self._communicator.rank, max(max(row) for row in table)
        sent, received = (source.new_empty((self._size, most)) for _ in range(2))
        for row, part in zip(sent, source.split(table[rank]), strict=True):
            row[: part.numel()] = part
        self._run("AllToAll", sent, received, *_count_and_type(sent, self._size))
        for row, part in zip(received, target.split([counts[rank] for counts in table]), strict=True):
            part.copy_(row[: part.numel()])

    def _agreed_table(self, splits: Sequence[Sequence[int]]) -> list[list[int]]:
        """How many elements each rank (row) gives to each (column). Raises: RanksDisagreeError, in all ranks alike."""
        mine = torch.tensor([*splits[0], *splits[1]], dtype=torch.int64, device="cpu")
        table = mine.new_empty((self._size, 2 * self._size))
        self._run("AllGather", mine, table, *_count_and_type(mine))
        given, expected = (half.tolist() for half in table.split(self._size, dim=1))
        for giver, row in enumerate(given):
            for taker, count in enumerate(row):
                if count != expected[taker][giver]:
                    text = f"rank {giver} has {count} elements for rank {taker}, which expects {expected[taker][giver]}"
                    raise RanksDisagreeError(f"{MISMATCH}: {text}")
        return given
