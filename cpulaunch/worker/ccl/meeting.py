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
import time
from contextlib import suppress

from cpulaunch.worker.ccl.errors import PeerLostError, RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TOKEN_BYTES = 64
SLOT_BYTES, PID_AT, CALLS_AT, CALL_BYTES = 128, 4, 32, 32
"""A slot: how many collectives its rank has come to, its process id, and the last two of them, by turns: a rank can be
ahead of another's reading by one."""
CALL = struct.Struct("<QiBBBB")
"""Elements, root, and the numbers of the collective, the type, the operation, and nothing."""

_SYSCALL_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_ALL = 2**31 - 1
SPINS = 60
"""Looks at a slot before sleeping: some ten microseconds, in which ranks that compute the same mostly arrive."""
GLANCE_SECONDS = 0.5
"""After so long without news a waiting rank looks whether the others still live."""

_futex: Any = ctypes.CDLL(None).syscall
_futex.restype = ctypes.c_long


class _Pause(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_GLANCE = _Pause(0, int(GLANCE_SECONDS * 1e9))


def open_memory(store: Any, *, rank: int, size: int) -> mmap.mmap | None:
    """Memory that all ranks of the group share; None, for all of them, if any is on another host.

    Effect: uses the store's keys meeting/*; every rank of the group must call it.
    """
    bytes_needed = TOKEN_BYTES + size * SLOT_BYTES
    memory: mmap.mmap | None
    if rank == 0:
        memory = _first(store, bytes_needed)
        found = [store.get(f"meeting/{other}") == b"1" for other in range(1, size)]
        store.set("meeting/verdict", "1" if all(found) else "0")
    else:
        memory = _other(store.get("meeting/place"), bytes_needed)
        store.set(f"meeting/{rank}", "0" if memory is None else "1")
    return memory if store.get("meeting/verdict") == b"1" else None


def _first(store: Any, bytes_needed: int) -> mmap.mmap:
    descriptor = os.memfd_create("cpulaunch-ccl")
    os.ftruncate(descriptor, bytes_needed)
    memory = mmap.mmap(descriptor, bytes_needed)
    token = os.urandom(TOKEN_BYTES // 2).hex()
    memory[:TOKEN_BYTES] = token.encode()
    # The descriptor stays open until the process ends: the others come through it, in their own time.
    store.set("meeting/place", f"/proc/{os.getpid()}/fd/{descriptor} {token}")
    return memory


def _other(place: bytes, bytes_needed: int) -> mmap.mmap | None:
    """The first rank's memory; None if this process cannot see it (another host, container or user)."""
    path, _, token = place.decode().partition(" ")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, bytes_needed)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[:TOKEN_BYTES] == token.encode() else None


class Meeting:
    """One rank's seat at its group's meetings."""

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int, describe: Callable[[bytes], str]) -> None:
        """`describe` says what a packed call is, for errors."""
        self._memory, self._rank, self._describe = memory, rank, describe
        self._slots = [TOKEN_BYTES + SLOT_BYTES * each for each in range(size)]
        self._counts = [ctypes.c_uint32.from_buffer(memory, slot) for slot in self._slots]
        self._addresses = [ctypes.addressof(count) for count in self._counts]
        self._others = [each for each in range(size) if each != rank]
        self._number = 0
        self._alive: dict[int, int] = {}
        struct.pack_into("<I", memory, self._slots[rank] + PID_AT, os.getpid())

    def meet(self, call: bytes, seconds: float) -> None:
        """Effect: returns when all ranks are about to do this call.

        Raises: RanksDisagreeError if one is about to do another; PeerLostError if one has ended or stays away.
        """
        self._number = number = self._number + 1 & 0xFFFFFFFF
        at = CALLS_AT + CALL_BYTES * (number & 1)
        mine = self._slots[self._rank] + at
        self._memory[mine : mine + CALL.size] = call
        self._counts[self._rank].value = number
        _futex(_SYSCALL_FUTEX, ctypes.c_void_p(self._addresses[self._rank]), _FUTEX_WAKE, _ALL, None, None, 0)
        for other in self._others:
            if not self._has_come(other, number):
                self._await(other, number, seconds)
        for other in self._others:
            theirs = self._slots[other] + at
            if self._memory[theirs : theirs + CALL.size] != call:
                raise RanksDisagreeError(self._disagreement(call, other, self._memory[theirs : theirs + CALL.size]))

    def _has_come(self, other: int, number: int) -> bool:
        """Whether a rank has come to this collective, in a moment; counts go round after 2**32."""
        count = self._counts[other]
        return any((count.value - number) & 0xFFFFFFFF < 0x80000000 for _ in range(SPINS))

    def _await(self, other: int, number: int, seconds: float) -> None:
        """Effect: sleeps until a rank has come to this collective. Raises: PeerLostError."""
        deadline = time.monotonic() + seconds
        count, address = self._counts[other], ctypes.c_void_p(self._addresses[other])
        while ((seen := count.value) - number) & 0xFFFFFFFF >= 0x80000000:
            _futex(_SYSCALL_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(_GLANCE), None, 0)
            if count.value != seen:
                continue
            lost = self.lost()
            if lost is not None and lost[0] == other:
                raise PeerLostError(f"rank {other} of the group (process {lost[1]}) ended before it came to the call")
            if time.monotonic() > deadline:
                raise PeerLostError(f"rank {other} of the group did not come to the call within {seconds:.0f} s")

    def lost(self) -> tuple[int, int] | None:
        """A rank whose process has ended, with the process id; None if all live."""
        for other in self._others:
            (pid,) = struct.unpack_from("<I", self._memory, self._slots[other] + PID_AT)
            if pid and self._has_ended(other, pid):
                return other, pid
        return None

    def _has_ended(self, other: int, pid: int) -> bool:
        if other not in self._alive:
            try:
                self._alive[other] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except OSError:
                return False  # A kernel before 5.3, or no descriptor left: the timeout decides.
        return bool(select.select([self._alive[other]], [], [], 0)[0])

    def _disagreement(self, mine: bytes, other: int, theirs: bytes) -> str:
        return (
            f"ranks of the group disagree: rank {self._rank} calls {self._describe(mine)}, "
            f"rank {other} {self._describe(theirs)}"
        )

    def close(self) -> None:
        """Effect: other ranks' processes are watched no more."""
        while self._alive:
            with suppress(OSError):
                os.close(self._alive.popitem()[1])
