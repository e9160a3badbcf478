"""TCP connections between ranks on several hosts, to detect lost ranks: each rank has one to rank 0.

A call of oneCCL that waits for an exited process never returns. The kernel closes the connections of a process when it
exits, for whatever reason, so rank 0 sees this at once and notifies the others.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress

from cpulaunch.worker.ccl.oneccl.handshakes import MAX_CALLERS, PROCESS, RETRY_SECONDS, TOKEN_BYTES, accept_ranks
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ADDRESS_KEY = "connections/address"
"""Key of the store with the address and port of rank 0 and the token that ranks of the group send."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Settings of TCP keep-alive: a host that does not respond is lost after about half a minute. Source: tcp(7)."""


class PeerConnections:
    """One rank's connections to other ranks, and the process ids of those ranks."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._lost: tuple[int, int] | None = None
        self._lock = threading.Lock()
        """Several threads may wait for collectives of a group and check for lost peers at the same time."""
        _open.add(self)

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, connection: socket.socket, rank: int, process: int) -> None:
        """Effect: takes over the connection to a rank, whose process id is `process`."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        connection.setblocking(False)
        self._sockets[rank], self._processes[rank] = connection, process
        self._poll.register(connection, select.POLLIN)

    def lost_peer(self, seconds: float = 0) -> tuple[int, int] | None:
        """Rank and process id of a peer that has exited or left; None if none has within `seconds`.

        Effect: notifies the connected ranks of the loss.
        """
        with self._lock:
            if self._lost is None and self._sockets:
                ready = dict(self._poll.poll(seconds * 1000))
                for rank in [each for each, connection in self._sockets.items() if connection.fileno() in ready]:
                    self._lost = self._lost or self._report_from(rank)
                if self._lost is not None:
                    self._notify(self._lost)
            return self._lost

    def _report_from(self, rank: int) -> tuple[int, int] | None:
        """The lost rank that a rank reports, and its process id; the reporting rank itself if its connection is closed.

        None if the connection has no data after all.
        """
        message = b""
        try:
            message = self._sockets[rank].recv(PROCESS.size)
        except BlockingIOError:  # The data had a wrong checksum. Source: select(2), BUGS.
            return None
        except OSError:
            pass
        return PROCESS.unpack(message) if len(message) == PROCESS.size else (rank, self._processes[rank])

    def _notify(self, lost: tuple[int, int]) -> None:
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.send(PROCESS.pack(*lost))

    def close(self) -> None:
        """Effect: closes all connections, by which the other ranks learn that this one has left."""
        with self._lock:
            while self._sockets:
                connection = self._sockets.popitem()[1]
                self._poll.unregister(connection)
                connection.close()

    leave = close

    def close_in_child(self) -> None:
        """Effect: as `close`, in a forked child, where no thread is left to release a held lock."""
        self._lock = threading.Lock()
        self.close()


_open: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def _close_all() -> None:
    for connections in list(_open):
        connections.close_in_child()


# A child that outlives its rank must not keep the connections of that rank open.
os.register_at_fork(after_in_child=_close_all)


def open_connections(store: Any, address: str, *, rank: int, size: int, seconds: float) -> PeerConnections:
    """This rank's connections. `address` is that of this host, to which other ranks connect.

    Effect: waits for all ranks; rank 0 publishes its address under ADDRESS_KEY. Raises: CclError if a connection fails.
    """
    try:
        if rank == 0:
            return _accept_all(store, address, size, seconds)
        return _connect(store.get(ADDRESS_KEY), rank, seconds)
    except TimeoutError:
        raise PeerLostError(f"not all ranks of the group connected within {seconds:.0f} s") from None
    except OSError as error:
        hint = "hint: GLOO_SOCKET_IFNAME must name the interface that leads to the other hosts"
        raise CclError(f"ranks of several hosts cannot connect: {error}\n{hint}") from None


def _accept_all(store: Any, address: str, size: int, seconds: float) -> PeerConnections:
    """Rank 0's connections to all others. Raises: TimeoutError, OSError."""
    connections, token = PeerConnections(), os.urandom(TOKEN_BYTES // 2).hex()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def add(connection: socket.socket, rank: int, process: int) -> None:
        with suppress(OSError):  # It has left again, which its closed connection will show.
            connection.send(PROCESS.pack(0, os.getpid()))
        connections.add(connection, rank, process)

    try:
        with socket.create_server((address, 0), family=family, backlog=size + MAX_CALLERS) as listener:
            store.set(ADDRESS_KEY, f"{address} {listener.getsockname()[1]} {token}")
            ranks = range(1, size)
            asyncio.run(accept_ranks(listener, add, token=token.encode(), ranks=ranks, seconds=seconds))
    except BaseException:
        connections.close()  # Ranks that have connected must not wait for the others.
        raise
    return connections


def _connect(published: bytes, rank: int, seconds: float) -> PeerConnections:
    """The connection of another rank to rank 0. `published` is the value of ADDRESS_KEY. Raises: CclError, OSError.

    Rank 0 closes a connection that strangers have outnumbered, so the rank tries again while somebody listens there.
    """
    address, port, token = published.decode().split()
    deadline = time.monotonic() + seconds
    handshake = token.encode() + PROCESS.pack(rank, os.getpid())
    connection = socket.create_connection((address, int(port)), timeout=seconds)
    while True:
        try:
            connection.sendall(handshake)
            message = _received(connection, PROCESS.size, deadline)
        except ConnectionError:
            message = b""
        except BaseException:
            connection.close()
            raise
        if len(message) == PROCESS.size:
            connections = PeerConnections()
            connections.add(connection, *PROCESS.unpack(message))
            return connections
        connection.close()
        time.sleep(RETRY_SECONDS)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            connection = socket.create_connection((address, int(port)), timeout=left)
        except ConnectionError:
            lost = "rank 0 of the group exited or timed out before all ranks had connected"
            raise PeerLostError(lost) from None


def _received(connection: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes from a connection; fewer if the peer closes it before. Raises: TimeoutError after the deadline."""
    received = b""
    while len(received) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        more = connection.recv(size - len(received))
        if not more:
            break
        received += more
    return received
