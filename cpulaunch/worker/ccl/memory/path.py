"""Collectives of ranks on one host, through memory that they share, piece by piece.

To reduce a large tensor, each rank reduces its share of every piece, then copies the others'.
The path needs no busy thread and no space in /dev/shm.
"""

import ctypes
import mmap
import os
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from torch import Tensor

from cpulaunch.worker.ccl.memory import library
from cpulaunch.worker.ccl.memory.library import ALL_RANKS, NativeGroup, NativeReduction, Operation, RankMemory
from cpulaunch.worker.ccl.wire.collectives import CollectivePath
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import CALL, Reduction, describe_call, name_and_root, packed_call

FROM_ROOT, SCATTERS = ("broadcast", "scatter"), ("reduce_scatter", "scatter", "all_to_all")
"""Collectives in which the root alone sends; in which a source has a block for each rank."""
_CallBytes = ctypes.c_uint8 * CALL.size
HOW_LOST = {library.LEFT: "left the group", library.EXITED: "exited before it reached this collective"}


class MemoryPath(CollectivePath):
    """A rank's collectives through memory that the ranks of its host share."""

    def __init__(
        self, memory: mmap.mmap, *, rank: int, processes: Sequence[int], pidfds: Sequence[int], seconds: float
    ) -> None:
        """`processes` and `pidfds` are of all ranks, verified; a pidfd is -1 if unknown. Raises: OSError."""
        functions, size = library.load(), len(processes)
        if functions is None:
            raise OSError("the compiled library is missing")
        self.rank, self.size = rank, size
        self.processes, self._owner = list(processes), os.getpid()
        self.exited = partial(first_exited, list(pidfds))  # For the group's set-up.
        self._close_pidfds = weakref.finalize(self, close_all, list(pidfds))
        self._close_pidfds.atexit = False
        anchor = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(anchor)
        ranks = (RankMemory * size)()
        for each in range(size):
            slot = start + library.SLOT_BYTES * each
            ranks[each] = RankMemory(slot=slot, process=processes[each], pidfd=pidfds[each])
            for parity in (0, 1):
                ranks[each].payloads[parity] = start + library.payload_offset(size, each, parity)
                ranks[each].splits[parity] = start + library.splits_offset(size, each, parity)
        self._kept_alive = memory, anchor, ranks
        may_spin = len(set[int]().union(*map(_cpus, processes))) >= size  # Else a late rank may need this rank's CPU.
        self.native = NativeGroup(
            ranks=ranks,
            rank=rank,
            size=size,
            spin_nanoseconds=int(library.SPIN_SECONDS * 1e9 * may_spin),
            poll_nanoseconds=int(library.POLL_SECONDS * 1e9),
            payload_bytes=library.payload_bytes(size),
            piece_bytes=min(library.PIECE_BYTES, library.payload_bytes(size)),
        )
        self._operation = Operation()
        self._pointers = ctypes.byref(self.native), ctypes.byref(self._operation)
        self._start, self._continue, self._leave = (functions[name] for name in ("all_reduce", "run", "leave"))
        self.set_timeout(seconds)

    def set_timeout(self, seconds: float) -> None:
        """Effect: a rank that is later than this by `seconds` is lost."""
        self.seconds = seconds
        self.native.timeout_nanoseconds = int(min(seconds, 1e9) * 1e9)

    def slot(self, rank: int) -> Any:
        """A rank's slot in the shared memory."""
        return library.Slot.from_address(self.native.ranks[rank].slot)

    def splits(self, rank: int, parity: int) -> Sequence[int]:
        """Bytes that a rank sends to each rank in an all-to-all, then bytes that it expects from each."""
        return list((ctypes.c_uint64 * (2 * self.size)).from_address(self.native.ranks[rank].splits[parity]))

    def leave(self) -> None:
        """Effect: ranks that wait for this one, now or later, fail. Does nothing in a forked child."""
        if os.getpid() == self._owner:
            self._leave(self._pointers[0])

    def close(self) -> None:
        """Effect: leaves, and closes the descriptors of the other ranks' processes."""
        self.leave()
        for rank in range(self.size):
            self.native.ranks[rank].pidfd = -1
        self._close_pidfds()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        if not tensor.is_contiguous() or tensor.is_neg():
            super().all_reduce(tensor, reduction)
            return
        call = packed_call("all_reduce", tensor.dtype, tensor.numel(), reduced=reduction.number)
        address, native = tensor.data_ptr(), _native(reduction, self.size)
        outcome = self._start(*self._pointers, call, address, tensor.nbytes, native)
        if outcome:
            self._complete(outcome)

    def run_call(
        self,
        call: bytes,
        target: Tensor | None = None,
        source: Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        splits: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Effect: runs the collective. A rank without a target receives nothing, one without a source sends nothing."""
        name, root = name_and_root(call)
        operation = Operation(_CallBytes.from_buffer_copy(call))
        operation.sender, operation.scatters = root if name in FROM_ROOT else ALL_RANKS, name in SCATTERS
        if source is not None:
            operation.source, operation.bytes = source.data_ptr(), source.nbytes
        if target is not None:
            operation.target, size = target.data_ptr(), target.nbytes
            operation.bytes = size if source is None or size < source.nbytes else source.nbytes
        if splits is not None and source is not None:
            sizes = [count * source.itemsize for counts in splits for count in counts]
            operation.splits, operation.bytes = (ctypes.c_uint64 * len(sizes))(*sizes), 0
        if reduction is not None:
            operation.reduction = _native(reduction, self.size)
        ctypes.memmove(self._pointers[1], ctypes.byref(operation), ctypes.sizeof(operation))
        outcome = self._continue(*self._pointers)
        if outcome:
            self._complete(outcome)

    def _complete(self, outcome: int) -> None:
        """Effect: continues an operation that a signal has interrupted. Raises: the error of one that failed."""
        while outcome == library.INTERRUPTED:  # Between two calls Python runs the handlers of signals.
            outcome = self._continue(*self._pointers)
        if outcome:
            raise self._error(outcome)

    def _error(self, outcome: int) -> CclError:
        if outcome == library.ABORTED:
            return CclError("the group was aborted")
        failed, parity = self._operation.failed_rank, self._operation.parity
        if outcome in HOW_LOST:
            return PeerLostError(f"rank {failed} of the group (process {self.processes[failed]}) {HOW_LOST[outcome]}")
        if outcome == library.LATE:
            return PeerLostError(
                f"rank {failed} of the group did not reach this collective within {self.seconds:.0f} s: "
                "the collective timed out (the timeout is that of the group or of the call)"
            )
        if outcome == library.UNEVEN:
            other = self._operation.other_rank
            sent = self.splits(failed, parity)[other]
            expected = self.splits(other, parity)[self.size + failed]
            text = f"rank {failed} has {sent} bytes for rank {other}, which expects {expected}"
        else:
            calls = [bytes(self.slot(rank).announcements[parity]) for rank in (self.rank, failed)]
            mine, theirs = map(describe_call, calls)
            text = f"rank {self.rank} calls {mine}, rank {failed} calls {theirs}"
        return RanksDisagreeError(f"the ranks' collectives do not match: {text}")

    def lost_peer(self) -> None:
        """None: a collective itself detects the loss of a peer."""


@cache
def _native(reduction: Reduction, size: int) -> Any:
    """A pointer to the reduction as the library knows it."""
    divisor = size if reduction.averages else 1
    return ctypes.pointer(NativeReduction(reduction.kind, reduction.operation, divisor))


def close_all(descriptors: Sequence[int]) -> None:
    """Effect: closes the descriptors."""
    for descriptor in descriptors:
        with suppress(OSError):  # -1, or one that the program has closed, as daemons do.
            os.close(descriptor)


def _cpus(process: int) -> set[int]:
    """The CPUs on which a process may run; none if it has exited. Source: sched_getaffinity(2)."""
    with suppress(OSError):
        return os.sched_getaffinity(process)
    return set()


def first_exited(pidfds: Sequence[int]) -> int | None:
    """A rank whose process has exited; None if none is known to have."""
    poll = select.poll()
    for pidfd in pidfds:
        if pidfd >= 0:
            poll.register(pidfd, select.POLLIN)
    ready = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}  # None that the program has closed.
    return next((rank for rank, pidfd in enumerate(pidfds) if pidfd in ready), None)
