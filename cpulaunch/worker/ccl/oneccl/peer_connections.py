"""TCP connections between ranks on several hosts, to detect lost ranks: each rank has one to rank 0.

A call of oneCCL that waits for an exited process never returns. The kernel closes the connections of a process when it
exits, for whatever reason, so rank 0 sees this at once and notifies the others.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress

from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TOKEN_BYTES = 32
PROCESS = struct.Struct("<II")
"""A rank of the group, and its process id."""
HANDSHAKE_SECONDS = 10
"""Time within which a connected rank must identify itself."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds after which a host that no longer answers counts as lost: about half a minute. Source: tcp(7)."""


class PeerConnections:
    """One rank's connections to others, by rank, and those ranks' process ids."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._lost: tuple[int, int] | None = None
        self._lock = threading.Lock()
        """Several threads may wait for works of a group, and look here meanwhile."""
        _open.add(self)

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, line: socket.socket, rank: int, process: int) -> None:
        """Effect: the connection is watched."""
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEP_ALIVE.items():
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        line.setblocking(False)
        self._sockets[rank], self._processes[rank] = line, process
        self._poll.register(line, select.POLLIN)

    def lost_peer(self, patience: float = 0) -> tuple[int, int] | None:
        """A rank that has ended or left, with its process id; None if none has within `patience` seconds.

        Effect: the first rank tells the others.
        """
        with self._lock:
            if self._lost is None and self._sockets:
                ready = dict(self._poll.poll(patience * 1000))
                for rank in [each for each, line in self._sockets.items() if line.fileno() in ready]:
                    self._lost = self._lost or self._report_from(rank)
                if self._lost is not None:
                    self._notify(self._lost)
            return self._lost

    def _report_from(self, rank: int) -> tuple[int, int] | None:
        """Whom a rank reports as lost: itself, if its connection is closed; None if it says nothing after all."""
        said = b""
        try:
            said = self._sockets[rank].recv(PROCESS.size)
        except BlockingIOError:  # Data with a wrong checksum. Source: select(2), BUGS.
            return None
        except OSError:
            pass
        return PROCESS.unpack(said) if len(said) == PROCESS.size else (rank, self._processes[rank])

    def _notify(self, lost: tuple[int, int]) -> None:
        for line in self._sockets.values():
            with suppress(OSError):
                line.send(PROCESS.pack(*lost))

    def close(self) -> None:
        """Effect: the others learn that this rank comes no more."""
        with self._lock:
            while self._sockets:
                line = self._sockets.popitem()[1]
                self._poll.unregister(line)
                line.close()

    leave = close

    def close_in_child(self) -> None:
        """Effect: as close, in a forked child, where nobody is left to give back the lock."""
        self._lock = threading.Lock()
        self.close()


_open: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def _close_all() -> None:
    for lines in list(_open):
        lines.close_in_child()


# A child that lives on must not keep the connections of a rank that has ended.
os.register_at_fork(after_in_child=_close_all)


def open_connections(store: Any, address: str, *, rank: int, size: int, seconds: float) -> PeerConnections:
    """This rank's connections. `address` is this host's, for the others. Effect: waits for all; uses the keys lines/*.

    Raises: CclError if a connection cannot be made.
    """
    try:
        return _first(store, address, size, seconds) if rank == 0 else _other(store.get("lines/place"), rank, seconds)
    except TimeoutError:
        raise PeerLostError(f"not all ranks of the group connected within {seconds:.0f} s") from None
    except OSError as error:
        hint = "hint: GLOO_SOCKET_IFNAME must name the interface that leads to the other hosts"
        raise CclError(f"ranks of several hosts cannot connect: {error}\n{hint}") from None


def _first(store: Any, address: str, size: int, seconds: float) -> PeerConnections:
    lines, token = PeerConnections(), os.urandom(TOKEN_BYTES // 2).hex()
    deadline = time.monotonic() + seconds
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family, backlog=size) as listener:
            store.set("lines/place", f"{address} {listener.getsockname()[1]} {token}")
            while len(lines) < size - 1:
                line = _accept(listener, deadline)
                rank_and_process = _handshake(line, token)
                if rank_and_process is None:
                    line.close()  # Not a rank of the group, for example a port scan.
                else:
                    lines.add(line, *rank_and_process)
    except BaseException:
        lines.close()  # Ranks that have connected must not wait for the others.
        raise
    return lines


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    """The next connection. Raises: TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    listener.settimeout(left)
    return listener.accept()[0]


def _handshake(line: socket.socket, token: str) -> tuple[int, int] | None:
    """The rank that has connected, and its process id; None if it is none of the group."""
    line.settimeout(HANDSHAKE_SECONDS)
    try:
        said = _received(line, TOKEN_BYTES + PROCESS.size)
        if len(said) < TOKEN_BYTES + PROCESS.size or said[:TOKEN_BYTES] != token.encode():
            return None
        line.sendall(PROCESS.pack(0, os.getpid()))
    except OSError:
        return None
    return PROCESS.unpack(said[TOKEN_BYTES:])


def _other(place: bytes, rank: int, seconds: float) -> PeerConnections:
    address, port, token = place.decode().split()
    line = socket.create_connection((address, int(port)), timeout=seconds)
    try:
        line.sendall(token.encode() + PROCESS.pack(rank, os.getpid()))
        said = _received(line, PROCESS.size)
        if len(said) < PROCESS.size:
            raise PeerLostError("rank 0 of the group exited or timed out before all ranks had connected")
        lines = PeerConnections()
        lines.add(line, *PROCESS.unpack(said))
    except BaseException:
        line.close()
        raise
    return lines


def _received(line: socket.socket, size: int) -> bytes:
    """So many bytes, fewer if the connection ends before."""
    found = b""
    while len(found) < size and (more := line.recv(size - len(found))):
        found += more
    return found
