"""Collectives over oneCCL, between hosts or if the kernel forbids ranks to access each other's memory."""

from __future__ import annotations

from cpulaunch.worker.ccl.oneccl.call_check import CallCheck
from cpulaunch.worker.ccl.wire import codes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpulaunch.worker.ccl.memory.shared_barrier import SharedBarrier
    from cpulaunch.worker.ccl.oneccl.api import Communicator
    from cpulaunch.worker.ccl.wire.reductions import Reduction

_WIDE_BYTES = 8
PIECE_BYTES = 8 << 20
"""Size of the pieces of an all-reduce or a broadcast between hosts over TCP. Between two hosts, 24 and 96 MiB took a
third of the time in such pieces. Gather, scatter and all-to-all took longer, as their pieces need additional copies."""


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

    Tensors are contiguous; all ranks call the same methods in the same order. `seconds` is the timeout of a collective.
    """

    def __init__(
        self, communicator: Communicator, barrier: SharedBarrier | CallCheck, *, size: int, seconds: float
    ) -> None:
        self._communicator, self._barrier = communicator, barrier
        self._size, self._seconds = size, seconds
        self._is_wide = isinstance(barrier, CallCheck)

    def _synchronize(self, call: bytes, moved: Tensor) -> bool:
        """Whether the tensor has elements. Effect: waits until all ranks are about to run the call."""
        self._barrier.synchronize(call, self._seconds)
        return moved.numel() > 0

    def barrier(self, call: bytes) -> None:
        """Effect: returns when all ranks have called it."""
        self._barrier.synchronize(call, self._seconds)

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, reduction: Reduction) -> bool:
        """False: this path has no faster way than `all_reduce`."""
        return False

    def all_reduce(self, call: bytes, flat: Tensor, reduction: Reduction) -> None:
        """Effect: the elements are reduced over all ranks."""
        if self._synchronize(call, flat):
            for piece in _pieces(flat) if self._is_wide else (flat,):
                self._communicator.all_reduce(piece.data_ptr(), piece.numel(), reduction.kind, reduction.operation)
            reduction.finish(flat, self._size)

    def reduce(self, call: bytes, flat: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's elements are reduced over all ranks; those of other ranks do not change."""
        if not self._synchronize(call, flat):
            return
        # oneCCL overwrites the buffers of the other ranks too.
        row = flat if self._communicator.rank == root else flat.clone()
        self._communicator.reduce(row.data_ptr(), row.numel(), reduction.kind, operation=reduction.operation, root=root)
        if row is flat:
            reduction.finish(flat, self._size)

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the sources, reduced over all ranks."""
        if not self._synchronize(call, target):
            return
        self._communicator.reduce_scatter(
            source.data_ptr(),
            target.data_ptr(),
            count=target.numel(),
            kind=reduction.kind,
            operation=reduction.operation,
        )
        reduction.finish(target, self._size)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: copies the root's elements to all ranks."""
        if self._synchronize(call, flat):
            for piece in _pieces(flat) if self._is_wide else (flat,):
                self._communicator.broadcast(piece.data_ptr(), *_count_and_type(piece), root=root)

    def all_gather(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is the sources of all ranks, in rank order."""
        if self._synchronize(call, source):
            self._communicator.all_gather(source.data_ptr(), target.data_ptr(), *_count_and_type(source))

    def gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the root's target is the sources of all ranks, in rank order; only the root has a target.

        oneCCL has no gather: all ranks receive all sources.
        """
        whole = source.new_empty(self._size * source.numel()) if target is None else target
        self.all_gather(call, whole, source)

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the root's source; only the root has a source.

        oneCCL has no scatter: all ranks receive the whole source.
        """
        count, rank = target.numel(), self._communicator.rank
        whole = target.new_empty(self._size * count) if source is None else source
        self.broadcast(call, whole, root=root)
        target.copy_(whole[rank * count : (rank + 1) * count])

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is the parts for this rank of all sources, in rank order; all parts have the same size."""
        if self._synchronize(call, source):
            self._communicator.all_to_all(source.data_ptr(), target.data_ptr(), *_count_and_type(source, self._size))

    def exchange(self, call: bytes, target: Tensor, source: Tensor, table: Sequence[Sequence[int]]) -> None:
        """Effect: the target is the parts for this rank of all sources, in rank order.

        `table[i][j]` is the number of elements that rank i sends to rank j. Every part is padded to the largest.
        """
        rank, most = self._communicator.rank, max(max(counts) for counts in table)
        sent, received = (source.new_empty((self._size, most)) for _ in range(2))
        for row, part in zip(sent, source.split(list(table[rank])), strict=True):
            row[: part.numel()] = part
        self.all_to_all(call, received.view(-1), sent.view(-1))
        columns = [counts[rank] for counts in table]
        for row, part in zip(received, target.split(columns), strict=True):
            part.copy_(row[: part.numel()])

    def close(self) -> None:
        """Effect: destroys the communicator. Raises: CclError."""
        self._communicator.close()
