"""Collectives by oneCCL, between hosts or where the kernel keeps the ranks out of one another's memory."""

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
"""What of an all-reduce or a broadcast goes over TCP at a time: between two hosts, 24 and 96 MiB took a third of the
time. Gathering, scattering and all-to-all took longer in pieces, which have to be copied to or from their places."""


def _moved(tensor: Tensor, parts: int = 1) -> tuple[int, int]:
    """How many elements of which of oneCCL's types hold a part's bytes: what is only moved may be of any type."""
    size = tensor.nbytes // parts
    return (size // _WIDE_BYTES, codes.UINT64) if size % _WIDE_BYTES == 0 else (size, codes.UINT8)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """The elements in turn, none of them too many at once."""
    return flat.split(PIECE_BYTES // flat.element_size()) if flat.nbytes > PIECE_BYTES else (flat,)


class OnecclPath:
    """One rank's end of a communicator. Tensors are contiguous; every rank calls the same, in the same order."""

    def __init__(
        self, communicator: Communicator, barrier: SharedBarrier | CallCheck, *, size: int, seconds: float
    ) -> None:
        self._communicator, self._barrier = communicator, barrier
        self._size, self._seconds = size, seconds
        self._is_wide = isinstance(barrier, CallCheck)

    def _synchronize(self, call: bytes, moved: Tensor) -> bool:
        """Whether there is anything to move. Effect: all ranks are here, about to do the same. Raises: CclError."""
        self._barrier.synchronize(call, self._seconds)
        return moved.numel() > 0

    def barrier(self, call: bytes) -> None:
        """Effect: returns when all ranks are here."""
        self._barrier.synchronize(call, self._seconds)

    def all_reduce_at_once(self, call: bytes, tensor: Tensor, how: Reduction) -> bool:
        """False: there is no quicker way than all_reduce."""
        return False

    def all_reduce(self, call: bytes, flat: Tensor, how: Reduction) -> None:
        """Effect: the elements are reduced over all ranks."""
        if self._synchronize(call, flat):
            for piece in _pieces(flat) if self._is_wide else (flat,):
                self._communicator.all_reduce(piece.data_ptr(), piece.numel(), how.kind, how.operation)
            how.finish(flat, self._size)

    def reduce(self, call: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Effect: the root's elements are reduced over all ranks; the others' stay as they are."""
        if not self._synchronize(call, flat):
            return
        # What oneCCL leaves in the other ranks' memory is not theirs.
        row = flat if self._communicator.rank == root else flat.clone()
        self._communicator.reduce(row.data_ptr(), row.numel(), how.kind, operation=how.operation, root=root)
        if row is flat:
            how.finish(flat, self._size)

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, how: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        if not self._synchronize(call, target):
            return
        self._communicator.reduce_scatter(
            source.data_ptr(), target.data_ptr(), count=target.numel(), kind=how.kind, operation=how.operation
        )
        how.finish(target, self._size)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: the elements are the root's."""
        if self._synchronize(call, flat):
            for piece in _pieces(flat) if self._is_wide else (flat,):
                self._communicator.broadcast(piece.data_ptr(), *_moved(piece), root=root)

    def all_gather(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is all ranks' sources, in their order."""
        if self._synchronize(call, source):
            self._communicator.all_gather(source.data_ptr(), target.data_ptr(), *_moved(source))

    def gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the target, which the root alone has, is all ranks' sources, in their order: all ranks get them."""
        everywhere = source.new_empty(self._size * source.numel()) if target is None else target
        self.all_gather(call, everywhere, source)

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the source, which the root alone has: all ranks get all of it."""
        count, rank = target.numel(), self._communicator.rank
        everywhere = target.new_empty(self._size * count) if source is None else source
        self.broadcast(call, everywhere, root=root)
        target.copy_(everywhere[rank * count : (rank + 1) * count])

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target is what all ranks have for this one, all of the same size."""
        if self._synchronize(call, source):
            self._communicator.all_to_all(source.data_ptr(), target.data_ptr(), *_moved(source, self._size))

    def exchange(self, call: bytes, target: Tensor, source: Tensor, table: Sequence[Sequence[int]]) -> None:
        """Effect: the target is what all ranks have for this one: `table[i][j]` elements from rank i to rank j.

        All move as much as the largest.
        """
        rank, most = self._communicator.rank, max(max(row) for row in table)
        sent, received = (source.new_empty((self._size, most)) for _ in range(2))
        for place, part in zip(sent, source.split(list(table[rank])), strict=True):
            place[: part.numel()] = part
        self.all_to_all(call, received.view(-1), sent.view(-1))
        columns = [row[rank] for row in table]
        for place, part in zip(received, target.split(columns), strict=True):
            part.copy_(place[: part.numel()])

    def close(self) -> None:
        """Effect: the communicator is gone. Raises: CclError."""
        self._communicator.close()
