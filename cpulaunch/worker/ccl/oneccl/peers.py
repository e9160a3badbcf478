"""TCP connections between ranks on several hosts, to detect lost ranks: each rank has one to rank 0.

A call of oneCCL that waits for an exited process never returns. The kernel closes the connections of a process when it
exits, for whatever reason, so rank 0 sees this at once and notifies the others. Every rank binds its socket, and tells
the others its address and port, before any connects: rank 0 closes connections from elsewhere, without reading from
them, so that strangers do not delay the ranks.
"""

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait  # select.select() does not support descriptors above 1023.

from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError

NOTICE = struct.Struct("<II")
"""A lost rank and its process id."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Settings of TCP keep-alive: a host that does not respond is lost after about half a minute. Source: tcp(7)."""
MAX_WAITING = 4096
"""Connections that may wait for rank 0: as many as Linux allows by default."""


class PeerConnections:
    """One rank's connections to other ranks, and the process ids of those ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sockets: dict[int, socket.socket] = {}
        self._processes: list[int] = []
        self._lost: tuple[int, int] | None = None
        self._lock = threading.Lock()
        """Several threads may wait for collectives of a group and check for lost peers at the same time."""
        _open.add(self)

    def bind(self, address: str) -> str:
        """This rank's address, port and process id, separated by spaces.

        `address` is this host's. Effect: binds a socket to it; rank 0 listens. Raises: OSError.
        """
        own = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._sockets[self._rank] = own
        own.bind((address, 0))
        if self._rank == 0:
            own.listen(MAX_WAITING)
        return " ".join(map(str, (*own.getsockname()[:2], os.getpid())))

    def connect(self, members: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Effect: connects to the other ranks. `members`: address, port and process id of all. Raises: CclError."""
        self._processes = [process for _, _, process in members]
        try:
            own = self._sockets.pop(self._rank)
            if self._rank == 0:
                self._accept(own, {member[:2]: rank for rank, member in enumerate(members) if rank}, seconds)
            else:
                own.settimeout(seconds)
                self._sockets[0] = own
                own.connect(members[0][:2])
            for connection in self._sockets.values():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, interval in KEEP_ALIVE.items():
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), interval)
                connection.setblocking(False)
        except OSError as error:
            self.close()  # Ranks that have connected must not wait for the others.
            raise _why_not_connected(error, seconds) from None

    def _accept(self, listener: socket.socket, missing: dict[tuple[str, int], int], seconds: float) -> None:
        """Effect: accepts the connections of the missing ranks, and closes all others. Raises: OSError."""
        deadline = time.monotonic() + seconds
        with listener:
            while missing:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                with suppress(ConnectionAbortedError):
                    connection, address = listener.accept()
                    rank = missing.pop(address[:2], None)
                    if rank is not None:
                        self._sockets[rank] = connection
                        continue
                    connection.close()  # Not a rank of the group, for example a port scan.
                if time.monotonic() > deadline:
                    raise TimeoutError

    def lost_peer(self, seconds: float = 0) -> tuple[int, int] | None:
        """Rank and process id of a peer that has exited or left; None if none has within `seconds`.

        Effect: notifies the connected ranks of the loss.
        """
        with self._lock:
            if self._lost is None and self._sockets:
                ready = wait(list(self._sockets.values()), seconds)
                for rank in [rank for rank, each in self._sockets.items() if each in ready]:
                    self._lost = self._lost or self._report_from(rank)
                notice = NOTICE.pack(*self._lost) if self._lost else b""
                for connection in self._sockets.values() if notice else ():
                    with suppress(OSError):
                        connection.send(notice)
            return self._lost

    def _report_from(self, rank: int) -> tuple[int, int] | None:
        """The lost rank that a rank reports, and its process id; the reporting rank itself if its connection is closed.

        None if the connection has no data after all.
        """
        message = b""
        try:
            message = self._sockets[rank].recv(NOTICE.size)
        except BlockingIOError:  # The data had a wrong checksum. Source: select(2), BUGS.
            return None
        except OSError:
            pass
        return NOTICE.unpack(message) if len(message) == NOTICE.size else (rank, self._processes[rank])

    def close(self) -> None:
        """Effect: closes all connections, by which the other ranks learn that this one has left."""
        with self._lock:
            while self._sockets:
                self._sockets.popitem()[1].close()

    leave = close


def _why_not_connected(error: OSError, seconds: float) -> CclError:
    if isinstance(error, TimeoutError):
        return PeerLostError(f"not all ranks of the group connected within {seconds:.0f} s")
    if isinstance(error, ConnectionError):
        return PeerLostError("rank 0 of the group exited or timed out before all ranks had connected")
    hint = "hint: GLOO_SOCKET_IFNAME must name the interface that leads to the other hosts"
    return CclError(f"ranks of several hosts cannot connect: {error}\n{hint}")


_open: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def _close_all() -> None:
    """Effect: closes all in a forked child, which must not keep them open if it outlives its rank."""
    for connections in list(_open):
        connections._lock = threading.Lock()  # No thread is left to release a held one.
        connections.close()


os.register_at_fork(after_in_child=_close_all)
