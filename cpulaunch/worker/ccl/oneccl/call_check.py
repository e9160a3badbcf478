"""Where the ranks of several hosts meet before each collective: they say what they are about to do, by oneCCL itself.

Without it oneCCL computes garbage from what does not match. It costs a message there and back.
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
"""When oneCCL has lost a connection, the line to the rank that ended tells in a moment which it was."""


class CallCheck:
    """One rank's part in its group's roll calls."""

    def __init__(
        self, communicator: Communicator, lines: PeerConnections, *, size: int, describe: Callable[[bytes], str]
    ) -> None:
        """`describe` says what a packed call is, for errors."""
        self._communicator, self._lines, self._describe = communicator, lines, describe
        self._size = size
        self._mine = ctypes.create_string_buffer(CALL.size)
        self._all = ctypes.create_string_buffer(CALL.size * size)
        self._places = ctypes.addressof(self._mine), ctypes.addressof(self._all)

    def synchronize(self, call: bytes, seconds: float) -> None:
        """Effect: returns when all ranks are about to do this call; the program's wait ends after `seconds`.

        Raises: RanksDisagreeError if one is about to do another.
        """
        self._mine.raw = call
        self._communicator.all_gather(*self._places, CALL.size // 8, codes.UINT64)
        said = self._all.raw
        if said != call * self._size:
            starts = range(0, len(said), CALL.size)
            raise RanksDisagreeError(self._disagreement([said[at : at + CALL.size] for at in starts]))

    def _disagreement(self, calls: list[bytes]) -> str:
        """As all ranks say it: the first rank, and the first that does something else."""
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        first, second = self._describe(calls[0]), self._describe(calls[other])
        return f"ranks of the group disagree: rank 0 calls {first}, rank {other} {second}"

    def lost_peer(self) -> tuple[int, int] | None:
        """A rank that has ended or left, with its process id; None if none has, as far as can be known."""
        return self._lines.lost_peer(LOST_PEER_SECONDS if self._communicator.has_failed else 0)

    def leave(self) -> None:
        """Effect: the others learn that this rank comes to no more collectives."""
        self._lines.close()

    close = leave
