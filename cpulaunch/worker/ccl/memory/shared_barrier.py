"""Where the ranks of one host meet before each collective: they say what they are about to do, and see that all agree.

Without it oneCCL computes garbage from what does not match, and waits forever, at full speed, for a rank that is gone.
The place is a page of memory that has no name, so that nothing of it stays behind however the ranks end. Each rank
writes its own slot, and sleeps in the kernel until another's has changed. Source: memfd_create(2), futex(2); stores are
seen in the order in which they are made on x86-64, for which alone oneCCL is built.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
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
SLOT_BYTES, PID_AT, LEFT_AT, SLEEPERS_AT, CALLS_AT, CALL_BYTES = 128, 8, 12, 16, 32, 32
"""A slot: how many collectives its rank has come to, its process id, whether it has left for good, whether another
sleeps until it comes to the next, and the last two collectives. The last two by turns: a rank can be ahead of another's
reading by one, and one that has just come must not take away the mark of who sleeps until it comes again."""
WORDS = struct.Struct("<QQ")
"""What a rank tells beside its call: two addresses, say. Nobody compares them."""
PAYLOAD_BYTES = 64 << 10
"""What a rank can bring along to a barrier. Pages that are never written take no memory."""

_SYSCALL_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_ALL = 2**31 - 1
SPINS = 400
"""Looks at a slot before sleeping: some fifty microseconds, in which ranks that compute the same mostly arrive."""
POLL_SECONDS = 0.5
"""After so long without news a waiting rank looks whether the others still live."""

_futex: Any = ctypes.CDLL(None).syscall
_futex.restype = ctypes.c_long


class _Pause(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_POLL_INTERVAL = _Pause(0, int(POLL_SECONDS * 1e9))


def bytes_needed(size: int) -> int:
    """Of memory for the barriers of this many ranks."""
    return _payload_at(size, size, 0)


def _payload_at(size: int, rank: int, turn: int) -> int:
    """Where a rank's payload of a turn begins: after all slots, on a page of its own."""
    slots = -(-(TOKEN_BYTES + size * SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    return slots + (2 * rank + turn) * PAYLOAD_BYTES


def open_memory(store: Any, *, rank: int, size: int) -> mmap.mmap | None:
    """Memory that all ranks of the group share; None, for all of them, if any is on another host.

    Effect: uses the store's keys barrier/*; every rank of the group must call it.
    """
    memory: mmap.mmap | None
    if rank == 0:
        memory = _first(store, size)
    else:
        memory = _other(store.get("barrier/place"), size)
        store.set(f"barrier/{rank}", "0" if memory is None else "1")
    return memory if store.get("barrier/verdict") == b"1" else None


def _first(store: Any, size: int) -> mmap.mmap:
    descriptor = os.memfd_create(MEMORY_NAME)
    try:
        os.ftruncate(descriptor, bytes_needed(size))
        memory = mmap.mmap(descriptor, bytes_needed(size))
        token = os.urandom(TOKEN_BYTES // 2).hex()
        memory[:TOKEN_BYTES] = token.encode()
        store.set("barrier/place", f"/proc/{os.getpid()}/fd/{descriptor} {token}")
        found = [store.get(f"barrier/{other}") == b"1" for other in range(1, size)]
    finally:
        os.close(descriptor)
    store.set("barrier/verdict", "1" if all(found) else "0")
    return memory


def _other(place: bytes, size: int) -> mmap.mmap | None:
    """The first rank's memory; None if this process cannot see it (another host, container or user)."""
    path, _, token = place.decode().partition(" ")
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMORY_NAME}"):
            return None  # Another host's process has that number here: what it has open is none of ours.
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
    """One rank's seat at its group's barriers."""

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]) -> None:
        """`describe` says what a packed call is, for errors."""
        self.rank, self.size = rank, size
        self.others = [each for each in range(size) if each != rank]
        self._memory, self._describe = memory, describe
        self._slots = [TOKEN_BYTES + SLOT_BYTES * each for each in range(size)]
        self._counts = [ctypes.c_uint32.from_buffer(memory, slot) for slot in self._slots]
        marks = [slot + SLEEPERS_AT for slot in self._slots]
        self._sleepers = [[ctypes.c_uint32.from_buffer(memory, mark + 4 * turn) for turn in (0, 1)] for mark in marks]
        self._addresses = [ctypes.c_void_p(ctypes.addressof(count)) for count in self._counts]
        self._spins = SPINS
        self._fence = threading.Lock()
        self._number = 0
        self._alive: dict[int, int] = {}
        struct.pack_into("<II", memory, self._slots[rank] + PID_AT, os.getpid(), 0)

    def sleep_at_once(self) -> None:
        """Effect: this rank does not look for the others first, who may need its CPU to come."""
        self._spins = 0

    def cpus(self) -> set[int]:
        """All on which the ranks may run, in all; they must have come to a barrier. Source: sched_getaffinity(2)."""
        found: set[int] = set()
        for rank in range(self.size):
            with suppress(OSError):  # It has ended.
                found |= os.sched_getaffinity(self.process(rank))
        return found

    def meet(self, call: bytes, seconds: float, *, words: tuple[int, int] = (0, 0)) -> None:
        """Effect: returns when all ranks are about to do this call, and have told their words.

        Raises: RanksDisagreeError if one is about to do another; PeerLostError if one has ended or stays away.
        """
        at = CALLS_AT + CALL_BYTES * (self._number + 1 & 1)
        mine = self._slots[self.rank] + at
        self._memory[mine : mine + CALL.size] = call
        WORDS.pack_into(self._memory, mine + CALL.size, *words)
        self.wait(seconds)
        for other in self.others:
            theirs = self._slots[other] + at
            if self._memory[theirs : theirs + CALL.size] != call:
                raise RanksDisagreeError(self._disagreement(call, other, self._memory[theirs : theirs + CALL.size]))

    def wait(self, seconds: float) -> None:
        """Effect: returns when all ranks are here. Raises: PeerLostError."""
        self._number = number = self._number + 1 & 0xFFFFFFFF
        self._counts[self.rank].value = number
        # A processor may look at the sleepers before others see the count; taking a lock keeps it from that.
        with self._fence:
            sleepers = self._sleepers[self.rank][number & 1]
        if sleepers.value:
            sleepers.value = 0
            _futex(_SYSCALL_FUTEX, self._addresses[self.rank], _FUTEX_WAKE, _ALL, None, None, 0)
        for other in self.others:
            if not self._comes(other, number):
                self._await(other, number, seconds)

    def words(self, other: int) -> tuple[int, int]:
        """What a rank told at the last barrier."""
        at = CALLS_AT + CALL_BYTES * (self._number & 1) + CALL.size
        first, second = WORDS.unpack_from(self._memory, self._slots[other] + at)
        return first, second

    def payloads(self, rank: int) -> tuple[memoryview, memoryview]:
        """The memory in which a rank brings something to barriers of even and of odd numbers."""
        view = memoryview(self._memory)
        starts = [_payload_at(self.size, rank, turn) for turn in (0, 1)]
        return view[starts[0] : starts[0] + PAYLOAD_BYTES], view[starts[1] : starts[1] + PAYLOAD_BYTES]

    @property
    def next_turn(self) -> int:
        """Which payload goes to the next barrier: nobody reads it any more from the last but one."""
        return self._number + 1 & 1

    def process(self, rank: int) -> int:
        """A rank's process id. It must have come to a barrier."""
        (pid,) = struct.unpack_from("<I", self._memory, self._slots[rank] + PID_AT)
        return int(pid)

    def _comes(self, other: int, number: int) -> bool:
        """Whether a rank comes to this collective in a moment; counts go round after 2**32."""
        count = self._counts[other]
        for _ in range(self._spins):  # noqa: SIM110 - any() would make the first look, which mostly suffices, dear
            if (count.value - number) & 0xFFFFFFFF < 0x80000000:
                return True
        return False

    def _is_there(self, other: int, number: int) -> bool:
        return (self._counts[other].value - number) & 0xFFFFFFFF < 0x80000000

    def _await(self, other: int, number: int, seconds: float) -> None:
        """Effect: sleeps until a rank has come to this collective. Raises: PeerLostError."""
        deadline = time.monotonic() + seconds
        count, address = self._counts[other], self._addresses[other]
        while True:
            gone = self._gone(other)  # Before the look at the count: it may come, and go, in between.
            seen = count.value
            if (seen - number) & 0xFFFFFFFF < 0x80000000:
                return
            if gone:
                raise self._lost(other, gone)
            self._sleepers[other][number & 1].value = 1
            _futex(_SYSCALL_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(_POLL_INTERVAL), None, 0)
            if count.value == seen and time.monotonic() > deadline:
                raise self._late(other, seconds)

    def _lost(self, other: int, gone: str) -> PeerLostError:
        return PeerLostError(f"rank {other} of the group (process {self.process(other)}) {gone}")

    def _late(self, other: int, seconds: float) -> PeerLostError:
        return PeerLostError(f"rank {other} of the group did not come to the call within {seconds:.0f} s")

    def _gone(self, other: int) -> str:
        """Why a rank will come to no more collectives than it has by now; empty if it may."""
        (left,) = struct.unpack_from("<I", self._memory, self._slots[other] + LEFT_AT)
        if left:
            return "left the group"
        return "ended before it came to the call" if self._has_ended(other) else ""

    def leave(self) -> None:
        """Effect: the others learn, now or when they next wait for this rank, that it comes to no more barriers.

        A forked child shares the memory, and must not speak for the rank.
        """
        if os.getpid() != self.process(self.rank):
            return
        struct.pack_into("<I", self._memory, self._slots[self.rank] + LEFT_AT, 1)
        _futex(_SYSCALL_FUTEX, self._addresses[self.rank], _FUTEX_WAKE, _ALL, None, None, 0)

    def lost(self) -> tuple[int, int] | None:
        """A rank whose process has ended, with the process id; None if all live."""
        return next(((other, self.process(other)) for other in self.others if self._has_ended(other)), None)

    def _has_ended(self, other: int) -> bool:
        pid = self.process(other)
        if not pid:
            return False
        if other not in self._alive:
            try:
                self._alive[other] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except OSError:
                return False  # A kernel before 5.3, or no descriptor left: the timeout decides.
        poll = select.poll()  # select() cannot take a descriptor above 1023.
        poll.register(self._alive[other], select.POLLIN)
        return bool(poll.poll(0))

    def _disagreement(self, mine: bytes, other: int, theirs: bytes) -> str:
        return (
            f"ranks of the group disagree: rank {self.rank} calls {self._describe(mine)}, "
            f"rank {other} {self._describe(theirs)}"
        )

    def close(self) -> None:
        """Effect: other ranks' processes are watched no more."""
        while self._alive:
            with suppress(OSError):
                os.close(self._alive.popitem()[1])
