"""Collectives of ranks on one host, which read each other's memory.

Small tensors are copied through shared memory. The kernel copies larger ones once, from process to process. An
all-reduce of a large tensor runs in two steps: each rank reduces its share of the elements, then copies the others'.
The path needs no busy thread and no space in /dev/shm. Source: process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import errno
import os

from cpulaunch.worker.ccl.memory.library import (
    ABORTED,
    ALL_RANKS,
    DISAGREES,
    EXITED,
    INTERRUPTED,
    LATE,
    LEFT,
    NO_RANK,
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


class MemoryPath:
    """A rank's collectives through shared memory and the memory of the other ranks.

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
        pointer = ctypes.byref(self._native(reduction))
        outcome = self._start(self._group.pointer, self._pointer, call, tensor.data_ptr(), tensor.nbytes, pointer)
        if outcome:
            self._complete(outcome)

    def reduce(self, call: bytes, flat: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's tensor is reduced over all ranks; those of other ranks do not change."""
        is_root, is_small, size = root == self._rank, flat.nbytes <= self._group.native.payload_bytes, flat.nbytes
        first, last = (0, size if is_root else 0) if is_small else self._share(size)
        share = flat.view(-1)[first // flat.itemsize : last // flat.itemsize]
        result = share if is_root else share.new_empty(share.shape)
        self._run(
            call,
            flat,
            size,
            reduction=ctypes.pointer(self._native(reduction)),
            result=result.data_ptr(),
            first=first,
            last=last,
            shares=1,
            sender=ALL_RANKS if is_root else NO_RANK,
            target=flat.data_ptr(),
        )

    def reduce_scatter(self, call: bytes, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        first = self._rank * target.nbytes
        self._run(
            call,
            source,
            source.nbytes,
            reduction=ctypes.pointer(self._native(reduction)),
            result=target.data_ptr(),
            first=first,
            last=first + target.nbytes,
        )

    def broadcast(self, call: bytes, flat: Tensor, *, root: int) -> None:
        """Effect: the root's tensor is copied to all ranks."""
        size = flat.nbytes
        if root == self._rank:
            self._run(call, flat, size)
        else:
            self._run(call, None, size, sender=root, bytes=size, target=flat.data_ptr())

    def all_gather(self, call: bytes, target: Tensor, source: Tensor) -> None:
        """Effect: the target holds the sources of all ranks, in rank order."""
        size = source.nbytes
        self._run(call, source, size, sender=ALL_RANKS, bytes=size, target=target.data_ptr())

    def gather(self, call: bytes, target: Tensor | None, source: Tensor) -> None:
        """Effect: the root's target holds the sources of all ranks, in rank order. It is None in other ranks."""
        if target is None:
            self._run(call, source, source.nbytes)
        else:
            self.all_gather(call, target, source)

    def scatter(self, call: bytes, target: Tensor, source: Tensor | None, *, root: int) -> None:
        """Effect: the target is this rank's part of the root's source, which is None in other ranks."""
        size = target.nbytes
        place = {"sender": root, "offset": self._rank * size, "bytes": size, "target": target.data_ptr()}
        self._run(call, source, size * self._size, **place)

    def all_to_all(self, call: bytes, target: Tensor, source: Tensor, splits: Sequence[Sequence[int]]) -> None:
        """Effect: the target holds the parts of all ranks' sources for this rank.

        `splits` are the numbers of elements for each rank, and from each.
        """
        sent, expected = ([count * source.itemsize for count in counts] for counts in splits)
        table = (ctypes.c_uint64 * (2 * self._size))(*sent, *expected)
        self._run(call, source, 0, target=target.data_ptr(), splits=table)

    def _run(self, call: bytes, source: Tensor | None = None, largest: int = 0, **more: Any) -> None:
        """Effect: runs the operation with these fields of `struct operation` in ccl_memory.c."""
        fields = {"sender": NO_RANK} | more
        if source is not None:
            fields |= {"source": source.data_ptr(), "source_bytes": source.nbytes}
        operation = Operation((ctypes.c_uint8 * CALL.size).from_buffer_copy(call), largest_bytes=largest, **fields)
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
        failed = self._operation.failed_rank
        who = f"rank {failed} of the group (process {self._group.processes[failed]})"
        if outcome == LATE:
            return PeerLostError(
                f"rank {failed} of the group did not reach this collective within {self._group.seconds:.0f} s: "
                "the collective timed out (the timeout is the group's)"
            )
        if outcome == LEFT:
            return PeerLostError(f"{who} left the group")
        if outcome == EXITED:
            return PeerLostError(f"{who} exited before it reached this collective")
        if outcome == ABORTED:
            return CclError("the group was aborted")
        if outcome in (DISAGREES, UNEVEN):
            return self._disagreement(outcome)
        if self._operation.error == errno.ESRCH:
            return PeerLostError(f"{who} exited during a collective")
        return CclError(f"cannot read the memory of {who}: {os.strerror(self._operation.error)}")

    def _disagreement(self, outcome: int) -> RanksDisagreeError:
        failed, other, parity = self._operation.failed_rank, self._operation.other_rank, self._operation.parity
        if outcome == UNEVEN:
            sent = self._group.splits(failed, parity)[other]
            expected = self._group.splits(other, parity)[self._size + failed]
            text = f"rank {failed} has {sent} bytes for rank {other}, which expects {expected}"
        else:
            mine, theirs = (self._announced_call(rank, parity) for rank in (self._rank, failed))
            text = f"rank {self._rank} calls {describe_call(mine)}, rank {failed} calls {describe_call(theirs)}"
        return RanksDisagreeError(f"the ranks' collectives do not match: {text}")

    def _announced_call(self, rank: int, parity: int) -> bytes:
        return bytes(self._group.slot(rank).announcements[parity])[: CALL.size]

    def _share(self, size: int) -> tuple[int, int]:
        """First byte of this rank's share of `size` bytes, and the byte after its last."""
        start = self._group.functions["share_start"]
        return start(self._group.pointer, self._rank, size), start(self._group.pointer, self._rank + 1, size)

    def _native(self, reduction: Reduction) -> NativeReduction:
        known = self._reductions.get(reduction)
        if known is None:
            divisor = self._size if reduction.averages else 1
            known = self._reductions[reduction] = NativeReduction(reduction.kind, reduction.operation, divisor)
        return known

    def lost_peer(self) -> None:
        """None: a collective itself detects the loss of a peer."""
