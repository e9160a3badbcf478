"""Collectives of ranks on one host, through memory that they share, piece by piece.

To reduce a large tensor, each rank reduces its share of every piece, then copies the others'.
The path needs no busy thread and no space in /dev/shm.
"""

from __future__ import annotations

import ctypes

from cpulaunch.worker.ccl.memory.library import (
    ABORTED,
    ALL_RANKS,
    EXITED,
    INTERRUPTED,
    LATE,
    LEFT,
    UNEVEN,
    NativeReduction,
    Operation,
    SharedGroup,
)
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import describe_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.wire.reductions import Reduction


HOW_LOST = {LEFT: "left the group", EXITED: "exited before it reached this collective"}


class MemoryPath:
    """A rank's collectives through memory that the ranks of its host share.

    Every rank of the group calls the same methods in the same order. Tensors are contiguous; `call` is the packed call
    that the ranks compare. Raises, from every method: RanksDisagreeError, PeerLostError, CclError.
    """

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank, group.size
        self._operation = Operation()
        self._pointer = ctypes.byref(self._operation)
        self._start, self._continue = group.functions["all_reduce"], group.functions["run"]
        self._reductions: dict[Reduction, Any] = {}
        self.set_timeout, self.leave, self.close = group.set_timeout, group.leave, group.close

    def barrier(self, call: bytes) -> None:
        """Effect: returns when all ranks have called it."""
        self._run(call)

    def all_reduce(self, call: bytes, tensor: Tensor, reduction: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        address, native = tensor.data_ptr(), self._native(reduction)
        outcome = self._start(self._group.pointer, self._pointer, call, address, tensor.nbytes, native)
        if outcome:
            self._complete(outcome)

    def reduce(self, call: bytes, flat: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's tensor is reduced over all ranks; those of other ranks do not change."""
        self._run(call, flat, flat if root == self._rank else None, flat.nbytes, reduction=self._native(reduction))

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the reduced source."""
        self._run(call, source, target, target.nbytes, reduction=self._native(reduction), scatters=1)

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: the root's tensor is copied to all ranks."""
        source, target = (flat, None) if root == self._rank else (None, flat)
        self._run(call, source, target, flat.nbytes, sender=root)

    def all_gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the target, if this rank has one, holds the sources of all ranks, in rank order."""
        self._run(call, source, target, source.nbytes)

    gather = all_gather

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the root's source, which is None in other ranks."""
        self._run(call, source, target, target.nbytes, sender=root, scatters=1)

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor, splits: Sequence[Sequence[int]]) -> None:
        """Effect: the target holds the parts of all ranks' sources for this rank.

        `splits` are the numbers of elements for each rank, and from each.
        """
        sent, expected = ([count * source.itemsize for count in counts] for counts in splits)
        table = (ctypes.c_uint64 * (2 * self._size))(*sent, *expected)
        self._run(call, source, target, splits=table, scatters=1)

    def _run(
        self, call: bytes, source: Tensor | None = None, target: Tensor | None = None, size: int = 0, **more: Any
    ) -> None:
        """Effect: runs `struct operation` of ccl_memory.c with blocks of `size` bytes and the fields in `more`."""
        buffers = {"source": source, "target": target}
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.items() if tensor is not None}
        fields = {"sender": ALL_RANKS, "bytes": size} | addresses | more
        operation = Operation((ctypes.c_uint8 * CALL.size).from_buffer_copy(call), **fields)
        ctypes.memmove(self._pointer, ctypes.byref(operation), ctypes.sizeof(operation))
        outcome = self._continue(self._group.pointer, self._pointer)
        if outcome:
            self._complete(outcome)

    def _complete(self, outcome: int) -> None:
        """Effect: continues an operation that a signal has interrupted. Raises: the error of one that failed."""
        while outcome == INTERRUPTED:  # Between two calls Python runs the handlers of signals.
            outcome = self._continue(self._group.pointer, self._pointer)
        if outcome:
            raise self._error(outcome)

    def _error(self, outcome: int) -> CclError:
        if outcome == ABORTED:
            return CclError("the group was aborted")
        failed = self._operation.failed_rank
        if outcome in HOW_LOST:
            return PeerLostError(
                f"rank {failed} of the group (process {self._group.processes[failed]}) {HOW_LOST[outcome]}"
            )
        if outcome == LATE:
            return PeerLostError(
                f"rank {failed} of the group did not reach this collective within {self._group.seconds:.0f} s: "
                "the collective timed out (the timeout is that of the group or of the call)"
            )
        parity = self._operation.parity
        if outcome == UNEVEN:
            other = self._operation.other_rank
            sent = self._group.splits(failed, parity)[other]
            expected = self._group.splits(other, parity)[self._size + failed]
            text = f"rank {failed} has {sent} bytes for rank {other}, which expects {expected}"
        else:
            calls = [bytes(self._group.slot(rank).announcements[parity]) for rank in (self._rank, failed)]
            mine, theirs = map(describe_call, calls)
            text = f"rank {self._rank} calls {mine}, rank {failed} calls {theirs}"
        return RanksDisagreeError(f"the ranks' collectives do not match: {text}")

    def _native(self, reduction: Reduction) -> Any:
        """A pointer to the reduction as the library knows it."""
        known = self._reductions.get(reduction)
        if known is None:
            divisor = self._size if reduction.averages else 1
            native = NativeReduction(reduction.kind, reduction.operation, divisor)
            known = self._reductions[reduction] = ctypes.pointer(native)
        return known

    def lost_peer(self) -> None:
        """None: a collective itself detects the loss of a peer."""
