"""A check that ranks on several hosts make before each collective: they exchange their packed calls over oneCCL.

Without it oneCCL computes wrong results from calls that do not match. It costs one round trip.
"""

from __future__ import annotations

import ctypes

from cpulaunch.worker.ccl.wire import codes
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cpulaunch.worker.ccl.oneccl.api import Communicator
    from cpulaunch.worker.ccl.oneccl.peer_connections import PeerConnections


LOST_PEER_SECONDS = 1.0
"""Time to wait for the notice that names the exited rank, after oneCCL has lost a connection."""


class CallCheck:
    """One rank's side of the check."""

    def __init__(
        self, communicator: Communicator, connections: PeerConnections, *, size: int, describe: Callable[[bytes], str]
    ) -> None:
        """`describe` turns a packed call into text for error messages."""
        self._communicator, self._connections, self._describe = communicator, connections, describe
        self._size = size
        self._mine = ctypes.create_string_buffer(CALL.size)
        self._all = ctypes.create_string_buffer(CALL.size * size)
        self._addresses = ctypes.addressof(self._mine), ctypes.addressof(self._all)

    def synchronize(self, call: bytes) -> None:
        """Effect: returns when all ranks are about to run this call.

        Raises: RanksDisagreeError if a rank is about to run another call.
        """
        self._mine.raw = call
        self._communicator.run("AllGather", *self._addresses, CALL.size // 8, codes.UINT64)
        calls = self._all.raw
        if calls != call * self._size:
            starts = range(0, len(calls), CALL.size)
            raise RanksDisagreeError(self._disagreement([calls[at : at + CALL.size] for at in starts]))

    def _disagreement(self, calls: list[bytes]) -> str:
        """The message, equal in all ranks: it names rank 0 and the first rank whose call differs."""
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        first, second = self._describe(calls[0]), self._describe(calls[other])
        return f"the ranks' collectives do not match: rank 0 calls {first}, rank {other} calls {second}"

    def lost_peer(self) -> tuple[int, int] | None:
        """Rank and process id of a peer that is known to have exited or left; None otherwise."""
        return self._connections.lost_peer(LOST_PEER_SECONDS if self._communicator.has_failed else 0)

    def leave(self) -> None:
        """Effect: notifies the other ranks that this one has left."""
        self._connections.close()
