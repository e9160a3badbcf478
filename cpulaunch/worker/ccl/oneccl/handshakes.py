"""Connections of a group's ranks, accepted side by side with those of strangers, which cannot delay them."""

from __future__ import annotations

import asyncio
import socket
import struct
from hmac import compare_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

TOKEN_BYTES = 32
PROCESS = struct.Struct("<II")
"""A message: a rank of the group and its process id."""
MESSAGE_BYTES = TOKEN_BYTES + PROCESS.size
HANDSHAKE_SECONDS = 10
"""Time within which a connected rank must identify itself, however many bytes it sends meanwhile."""
RETRY_SECONDS = 0.01
MAX_CALLERS = 256
"""At most this many connections, beyond those of the ranks, may be unidentified; then the oldest one is closed."""


async def accept_ranks(
    listener: socket.socket,
    found: Callable[[socket.socket, int, int], None],
    *,
    token: bytes,
    ranks: Collection[int],
    seconds: float,
) -> None:
    """Effect: passes the connection, rank and process id of each rank to `found`, as they identify themselves.

    Raises: TimeoutError if not all have done so within `seconds`.
    """
    loop, missing, all_found = asyncio.get_running_loop(), set(ranks), asyncio.Event()
    callers: dict[asyncio.Task[None], None] = {}

    async def identify(connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                message = await _received(connection, MESSAGE_BYTES)
            rank, process = PROCESS.unpack(message[TOKEN_BYTES:])
            if rank not in missing or not compare_digest(message[:TOKEN_BYTES], token):
                raise ConnectionError  # Not a rank of the group, for example a port scan.
        except (OSError, asyncio.CancelledError):
            connection.close()
            return
        missing.discard(rank)
        found(connection, rank, process)
        if not missing:
            all_found.set()

    def accept() -> None:
        """One connection at a time: what it has sent is read before the next one may take its place."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # The peer has gone.
            return
        except OSError:  # The limit of open files is reached.
            _cancel_oldest(callers)
            loop.remove_reader(listener)
            retries.append(loop.call_later(RETRY_SECONDS, loop.add_reader, listener, accept))
            return
        connection.setblocking(False)
        caller = loop.create_task(identify(connection))
        callers[caller] = None
        caller.add_done_callback(callers.pop)
        if len(callers) > MAX_CALLERS + len(ranks):
            _cancel_oldest(callers)

    retries: list[asyncio.TimerHandle] = []
    listener.setblocking(False)
    loop.add_reader(listener, accept)  # sock_accept neither yields nor can be cancelled while connections wait.
    try:
        async with asyncio.timeout(seconds):
            while missing:
                await all_found.wait()
    finally:
        for retry in retries:
            retry.cancel()
        loop.remove_reader(listener)


def _cancel_oldest(callers: dict[asyncio.Task[None], None]) -> None:
    oldest = next((caller for caller in callers if not caller.cancelling()), None)
    if oldest is not None:
        oldest.cancel()


async def _received(connection: socket.socket, size: int) -> bytes:
    """`size` bytes from the connection. Raises: OSError, also if the peer closes it before."""
    received = b""
    while len(received) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(received))
        if not more:
            raise ConnectionError
        received += more
    return received
