"""A barrier in shared memory, at which the ranks of one host compare their next collective before they run it.

Without the comparison oneCCL computes wrong results from calls that do not match, and waits forever, at full speed,
for a rank that has exited. The memory is a memfd, which has no name in a file system and so leaves nothing behind when
ranks are killed. Each rank writes to its own slot only, and sleeps in the kernel until the slot of a late rank changes.
Source: memfd_create(2), futex(2). The code relies on x86-64, where other CPUs see stores in program order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import time
from contextlib import suppress

from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import PeerLostError, RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MEMORY_NAME, TOKEN_BYTES = "cpulaunch-ccl", 64
SLOT_BYTES = 128
"""Distance between slots: two cache lines, so that ranks do not write to the same one."""
PAYLOAD_BYTES = 64 << 10
"""Largest tensor, in bytes, that a rank passes through the shared memory. Unwritten pages take no memory."""

_SYSCALL_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_WAKE_ALL = 2**31 - 1
SPINS = 400
"""Reads of a count before sleeping: about 50 microseconds, within which ranks with equal work usually arrive."""
POLL_SECONDS = 0.5
"""Time that a rank sleeps before it checks whether the late rank still exists."""

_futex: Any = ctypes.CDLL(None).syscall
_futex.restype = ctypes.c_long


class _TimeSpec(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Announcement(ctypes.Structure):
    """What a rank publishes at a barrier: its packed call, which ranks compare, and two values, which they do not."""

    _fields_ = (("call", ctypes.c_uint8 * CALL.size), ("values", ctypes.c_uint64 * 2))


class Slot(ctypes.Structure):
    """A rank's part of the shared memory; struct slot in ccl_memory.c.

    `count` is the number of barriers that the rank has reached, modulo 2**32. There are two announcements and two
    sleeper flags, for barriers of even and odd numbers: a rank can be one barrier ahead of a rank that still reads its
    announcement, and must not clear the flag of a rank that already sleeps until the next barrier.
    """

    _fields_ = (
        ("count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("process_id", ctypes.c_int32),
        ("has_left", ctypes.c_uint32),
        ("sleepers", ctypes.c_uint32 * 2),
        ("unused_too", ctypes.c_uint32 * 2),
        ("announcements", Announcement * 2),
    )


_POLL_INTERVAL = _TimeSpec(0, int(POLL_SECONDS * 1e9))


def bytes_needed(size: int) -> int:
    """Bytes of shared memory for a group of `size` ranks."""
    return _payload_offset(size, size, 0)


def _payload_offset(size: int, rank: int, parity: int) -> int:
    """Byte offset of a rank's payload for barriers of even (0) or odd (1) number: behind all slots, page-aligned."""
    slots = -(-(TOKEN_BYTES + size * SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    return slots + (2 * rank + parity) * PAYLOAD_BYTES


def open_memory(store: Any, *, rank: int, size: int) -> mmap.mmap | None:
    """Memory shared by all ranks of the group; None, in every rank, if one of them is on another host.

    Every rank of the group must call it. Effect: sets the store's keys barrier/*.
    """
    memory: mmap.mmap | None
    if rank == 0:
        memory = _create_memory(store, size)
    else:
        memory = _attach_memory(store.get("barrier/place"), size)
        store.set(f"barrier/{rank}", "0" if memory is None else "1")
    return memory if store.get("barrier/verdict") == b"1" else None


def _create_memory(store: Any, size: int) -> mmap.mmap:
    """Rank 0's new memory. Effect: publishes its location, and whether every other rank has attached it."""
    descriptor = os.memfd_create(MEMORY_NAME)
    try:
        os.ftruncate(descriptor, bytes_needed(size))
        memory = mmap.mmap(descriptor, bytes_needed(size))
        token = os.urandom(TOKEN_BYTES // 2).hex()
        memory[:TOKEN_BYTES] = token.encode()
        store.set("barrier/place", f"/proc/{os.getpid()}/fd/{descriptor} {token}")
        attached = [store.get(f"barrier/{other}") == b"1" for other in range(1, size)]
    finally:
        os.close(descriptor)
    store.set("barrier/verdict", "1" if all(attached) else "0")
    return memory


def _attach_memory(location: bytes, size: int) -> mmap.mmap | None:
    """Rank 0's memory; None if this process cannot open it (another host, container or user)."""
    path, _, token = location.decode().partition(" ")
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMORY_NAME}"):
            return None  # On another host, the process with this id is an unrelated one.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, bytes_needed(size))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[:TOKEN_BYTES] == token.encode() else None


class SharedBarrier:
    """One rank's view of its group's barrier."""

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]) -> None:
        """`describe` turns a packed call into text for error messages."""
        self.rank, self.size = rank, size
        self.others = [each for each in range(size) if each != rank]
        self._memory, self._describe = memory, describe
        starts = [TOKEN_BYTES + SLOT_BYTES * each for each in range(size)]
        self._slots = [Slot.from_buffer(memory, start) for start in starts]
        self._announcements = [(slot.announcements[0], slot.announcements[1]) for slot in self._slots]
        self._counts = [ctypes.c_uint32.from_buffer(memory, start + Slot.count.offset) for start in starts]
        flags = [start + Slot.sleepers.offset for start in starts]
        self._sleepers = [
            [ctypes.c_uint32.from_buffer(memory, flag + 4 * parity) for parity in (0, 1)] for flag in flags
        ]
        self._addresses = [ctypes.c_void_p(ctypes.addressof(count)) for count in self._counts]
        self._spins = SPINS
        self._fence = threading.Lock()
        self._number = 0
        self._pidfds: dict[int, int] = {}
        self._slots[rank].process_id, self._slots[rank].has_left = os.getpid(), 0

    def disable_spinning(self) -> None:
        """Effect: this rank sleeps at once when another is late, because the late rank may need its CPU."""
        self._spins = 0

    def cpus(self) -> set[int]:
        """All CPUs on which the ranks may run. Every rank must have reached a barrier. Source: sched_getaffinity(2)."""
        found: set[int] = set()
        for rank in range(self.size):
            with suppress(OSError):  # The process has exited.
                found |= os.sched_getaffinity(self.process(rank))
        return found

    def synchronize(self, call: bytes, seconds: float, *, values: tuple[int, int] = (0, 0)) -> None:
        """Effect: returns when all ranks are about to run this call, and have published their values.

        Raises: RanksDisagreeError if a rank is about to run another call; PeerLostError if a rank has exited, has left
        the group, or is not here within `seconds`.
        """
        parity = self.next_parity
        mine = self._announcements[self.rank][parity]
        ctypes.memmove(mine.call, call, CALL.size)
        mine.values[0], mine.values[1] = values
        self.wait(seconds)
        for other in self.others:
            theirs = bytes(self._announcements[other][parity].call)
            if theirs != call:
                raise RanksDisagreeError(self._disagreement(call, other, theirs))

    def wait(self, seconds: float) -> None:
        """Effect: returns when all ranks have reached this barrier. Raises: PeerLostError."""
        self._number = number = self._number + 1 & 0xFFFFFFFF
        self._counts[self.rank].value = number
        # The CPU may read the sleeper flag before other CPUs see the new count; taking a lock prevents this.
        with self._fence:
            sleepers = self._sleepers[self.rank][number & 1]
        if sleepers.value:
            sleepers.value = 0
            _futex(_SYSCALL_FUTEX, self._addresses[self.rank], _FUTEX_WAKE, _WAKE_ALL, None, None, 0)
        for other in self.others:
            if not self._arrives_soon(other, number):
                self._await(other, number, seconds)

    def values(self, other: int) -> tuple[int, int]:
        """The two values that a rank published at the last barrier."""
        first, second = self._announcements[other][self._number & 1].values
        return first, second

    def payloads(self, rank: int) -> tuple[memoryview, memoryview]:
        """The shared memory for a rank's small tensors, at barriers of even and of odd number."""
        view = memoryview(self._memory)
        starts = [_payload_offset(self.size, rank, parity) for parity in (0, 1)]
        return view[starts[0] : starts[0] + PAYLOAD_BYTES], view[starts[1] : starts[1] + PAYLOAD_BYTES]

    @property
    def next_parity(self) -> int:
        """0 or 1: the payload to write before the next barrier. No rank reads it any more for an earlier barrier."""
        return self._number + 1 & 1

    def process(self, rank: int) -> int:
        """A rank's process id; 0 if the rank has not opened the barrier yet."""
        return int(self._slots[rank].process_id)

    def _arrives_soon(self, other: int, number: int) -> bool:
        """Whether a rank reaches this barrier within the time of a spin. Counts wrap around at 2**32."""
        count = self._counts[other]
        for _ in range(self._spins):  # noqa: SIM110 - any() would slow down the first read, which usually suffices
            if (count.value - number) & 0xFFFFFFFF < 0x80000000:
                return True
        return False

    def _has_arrived(self, other: int, number: int) -> bool:
        return (self._counts[other].value - number) & 0xFFFFFFFF < 0x80000000

    def _await(self, other: int, number: int, seconds: float) -> None:
        """Effect: sleeps until a rank has reached this barrier. Raises: PeerLostError."""
        deadline = time.monotonic() + seconds
        count, address = self._counts[other], self._addresses[other]
        while True:
            departure = self._departure(other)  # Read before the count: the rank may arrive and leave in between.
            seen = count.value
            if (seen - number) & 0xFFFFFFFF < 0x80000000:
                return
            if departure:
                raise self._lost_error(other, departure)
            self._sleepers[other][number & 1].value = 1
            _futex(_SYSCALL_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(_POLL_INTERVAL), None, 0)
            if count.value == seen and time.monotonic() > deadline:
                raise self._timeout_error(other, seconds)

    def _lost_error(self, other: int, departure: str) -> PeerLostError:
        return PeerLostError(f"rank {other} of the group (process {self.process(other)}) {departure}")

    def _timeout_error(self, other: int, seconds: float) -> PeerLostError:
        return PeerLostError(f"rank {other} of the group did not reach this collective within {seconds:.0f} s")

    def _departure(self, other: int) -> str:
        """Why a rank will reach no further barrier, for error messages; empty if it still may."""
        if self._slots[other].has_left:
            return "left the group"
        return "exited before it reached this collective" if self._has_exited(other) else ""

    def leave(self) -> None:
        """Effect: ranks that wait for this one, now or later, fail because it has left the group.

        Does nothing in a forked child, which shares the memory but is not the rank.
        """
        if os.getpid() != self.process(self.rank):
            return
        self._slots[self.rank].has_left = 1
        _futex(_SYSCALL_FUTEX, self._addresses[self.rank], _FUTEX_WAKE, _WAKE_ALL, None, None, 0)

    def lost_peer(self) -> tuple[int, int] | None:
        """Rank and process id of a peer whose process has exited; None if all are running."""
        return next(((other, self.process(other)) for other in self.others if self._has_exited(other)), None)

    def _has_exited(self, other: int) -> bool:
        pid = self.process(other)
        if not pid:
            return False
        if other not in self._pidfds:
            try:
                self._pidfds[other] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except OSError:
                return False  # Linux before 5.3, or no file descriptor left: only the timeout detects the loss.
        poll = select.poll()  # select() does not support descriptors above 1023.
        poll.register(self._pidfds[other], select.POLLIN)
        return bool(poll.poll(0))

    def _disagreement(self, mine: bytes, other: int, theirs: bytes) -> str:
        return (
            f"the ranks' collectives do not match: rank {self.rank} calls {self._describe(mine)}, "
            f"rank {other} calls {self._describe(theirs)}"
        )

    def close(self) -> None:
        """Effect: the descriptors of the other ranks' processes are closed."""
        while self._pidfds:
            with suppress(OSError):
                os.close(self._pidfds.popitem()[1])
