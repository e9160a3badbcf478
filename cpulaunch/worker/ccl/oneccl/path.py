"""Collectives over oneCCL, between hosts or if ranks may not share memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpulaunch.worker.ccl.oneccl.library import Communicator
from cpulaunch.worker.ccl.oneccl.peers import PeerConnections
from cpulaunch.worker.ccl.wire.collectives import CollectivePath
from cpulaunch.worker.ccl.wire.errors import RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import CALL, UINT8, UINT64, Reduction, describe_call, name_and_root

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
    return (size // _WIDE_BYTES, UINT64) if size % _WIDE_BYTES == 0 else (size, UINT8)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """The elements in order, in pieces of at most PIECE_BYTES."""
    return flat.split(PIECE_BYTES // flat.element_size()) if flat.nbytes > PIECE_BYTES else (flat,)


class OnecclPath(CollectivePath):
    """One rank's collectives over a communicator.

    Before each, ranks exchange their packed calls, because oneCCL computes wrong results from calls that do not match.
    It costs one round trip. Raises, from every method: RanksDisagreeError in all ranks if the calls do not match.
    """

    def __init__(self, communicator: Communicator, peers: PeerConnections, *, size: int) -> None:
        self._communicator, self._peers, self._size = communicator, peers, size
        self._mine, self._calls = (ctypes.create_string_buffer(CALL.size * rows) for rows in (1, size))
        self._addresses = ctypes.addressof(self._mine), ctypes.addressof(self._calls)
        self.leave, self.close = peers.leave, communicator.close

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank's number."""
        return self._communicator.rank

    def lost_peer(self) -> tuple[int, int] | None:
        """Rank and process id of a peer that is known to have exited or left; None otherwise."""
        return self._peers.lost_peer(LOST_PEER_SECONDS if self._communicator.has_failed else 0)

    def set_timeout(self, seconds: float) -> None:
        """Effect: none: oneCCL has no timeout, so those who wait for a collective have one."""

    def run_call(self, call: bytes, target: Tensor | None = None, source: Tensor | None = None, **how: Any) -> None:
        """Effect: runs the collective."""
        self._compare(call)
        name, root = name_and_root(call)
        if target is not None or source is not None:
            getattr(self, f"_{name}")(target, source, root, **how)

    def _compare(self, call: bytes) -> None:
        """Effect: returns when all ranks are about to run this call."""
        self._mine.raw = call
        self._communicator.run("AllGather", *self._addresses, CALL.size // _WIDE_BYTES, UINT64)
        calls = [self._calls.raw[at : at + CALL.size] for at in range(0, CALL.size * self._size, CALL.size)]
        other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
        if other is not None:
            first, second = describe_call(calls[0]), describe_call(calls[other])
            raise RanksDisagreeError(f"{MISMATCH}: rank 0 calls {first}, rank {other} calls {second}")

    def _call(self, function: str, source: Tensor, target: Tensor, *numbers: int) -> None:
        """Effect: runs oneCCL's function if the tensors have elements.

        Its numbers: count, type, and reduction and root if it has them.
        """
        if numbers[0]:
            self._communicator.run(function, source.data_ptr(), target.data_ptr(), *numbers)

    def _all_reduce(self, flat: Tensor, _source: Tensor, _root: int, *, reduction: Reduction) -> None:
        for piece in _pieces(flat):
            self._call("AllReduce", piece, piece, piece.numel(), reduction.kind, reduction.operation)
        reduction.finish(flat, self._size)

    def _reduce(self, target: Tensor | None, source: Tensor, root: int, *, reduction: Reduction) -> None:
        row = source.clone() if target is None else target  # oneCCL overwrites the buffers of the other ranks too.
        self._call("Reduce", row, row, row.numel(), reduction.kind, reduction.operation, root)
        if target is not None:
            reduction.finish(target, self._size)

    def _reduce_scatter(self, target: Tensor, source: Tensor, _root: int, *, reduction: Reduction) -> None:
        self._call("ReduceScatter", source, target, target.numel(), reduction.kind, reduction.operation)
        reduction.finish(target, self._size)

    def _broadcast(self, target: Tensor | None, source: Tensor | None, root: int) -> None:
        for piece in _pieces(source if target is None else target):
            self._call("Broadcast", piece, piece, *_count_and_type(piece), root)

    def _all_gather(self, target: Tensor | None, source: Tensor, _root: int) -> None:
        whole = source.new_empty(self._size * source.numel()) if target is None else target
        self._call("AllGather", source, whole, *_count_and_type(source))

    _gather = _all_gather  # oneCCL has none: all ranks receive all sources.

    def _scatter(self, target: Tensor, source: Tensor | None, root: int) -> None:
        """oneCCL has no scatter: all ranks receive the whole source."""
        count, rank = target.numel(), self.rank
        whole = target.new_empty(self._size * count) if source is None else source
        self._broadcast(whole, None, root)
        target.copy_(whole[rank * count : (rank + 1) * count])

    def _all_to_all(self, target: Tensor, source: Tensor, _root: int, *, splits: Sequence[Sequence[int]]) -> None:
        """Every part is padded to the largest."""
        table = self._agreed_table(splits)
        rank, most = self.rank, max(max(row) for row in table)
        sent, received = (source.new_empty((self._size, most)) for _ in range(2))
        for row, part in zip(sent, source.split(table[rank]), strict=True):
            row[: part.numel()] = part
        self._call("AllToAll", sent, received, *_count_and_type(sent, self._size))
        for row, part in zip(received, target.split([counts[rank] for counts in table]), strict=True):
            part.copy_(row[: part.numel()])

    def _agreed_table(self, splits: Sequence[Sequence[int]]) -> list[list[int]]:
        """How many elements each rank (row) gives to each (column). Raises: RanksDisagreeError, in all ranks alike."""
        mine = torch.tensor([*splits[0], *splits[1]], dtype=torch.int64, device="cpu")
        table = mine.new_empty((self._size, 2 * self._size))
        self._call("AllGather", mine, table, *_count_and_type(mine))
        given, expected = (half.tolist() for half in table.split(self._size, dim=1))
        for giver, row in enumerate(given):
            for taker, count in enumerate(row):
                if count != expected[taker][giver]:
                    text = f"rank {giver} has {count} elements for rank {taker}, which expects {expected[taker][giver]}"
                    raise RanksDisagreeError(f"{MISMATCH}: {text}")
        return given
