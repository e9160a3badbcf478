"""The sockets of TCP that this process has, also those that torch has opened."""

from __future__ import annotations

import _socket
import os
import socket
import stat
import struct
import time
from contextlib import closing, contextmanager, suppress

from cpulaunch.system.tcp.owners import ESTABLISHED, place_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpulaunch.system.tcp.owners import Server

MAX_DESCRIPTORS = 1 << 12
"""Descriptors looked at without /proc."""
INFO_BYTES, LAST_AT = 60, 56
"""Of struct tcp_info, which begins with the state: how long ago, in ms, the last acknowledgement came.

Source: linux/tcp.h.
"""
LAST_ERROR_SECONDS = 0.25
"""The kernel counts that time in ticks of at most 10 ms."""
PAUSE_SECONDS = 0.02
PROBES = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 127}
"""The options of a socket that asks its other end each second, and is not closed if that one does not answer."""


def listens(port: int) -> bool:
    """Whether a socket of this process listens at this TCP port."""
    return any(_listens_at(descriptor, port) for descriptor in _sockets())


def clients_of(server: Server) -> dict[Server, int]:
    """Address and port of each connection that this process has to a server, and its state."""
    found, server = {}, place_of(server)
    for descriptor in _sockets():
        with suppress(OSError), closing(socket_of(descriptor)) as each:
            if _is_to(each, server):
                state = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]  # An error if it is not of TCP.
                found[place_of(each.getsockname())] = state
    return found


def is_idle(server: Server, client: Server) -> bool:
    """Whether a connection of this process is open, and the server has acknowledged all that was sent."""
    from fcntl import ioctl  # Here: few connections need them.
    from termios import TIOCOUTQ

    if (connection := _connection(server, client)) is None:
        return False
    with suppress(OSError), closing(connection):
        pending = ioctl(connection.fileno(), TIOCOUTQ, bytes(4))  # Of TCP it is SIOCOUTQ, tcp(7).
        return _state_and_last(connection)[0] == ESTABLISHED and not any(pending)
    return False


def is_acknowledged(server: Server, client: Server, seconds: float) -> bool:
    """Whether a server acknowledges what comes from now on by an idle connection of this process, within this time.

    Effect: keepalive probes, which have no data: the first comes a second after the last packet.
    """
    start = time.monotonic()
    if (connection := _connection(server, client)) is None:
        return False
    with suppress(OSError), closing(connection), _probes(connection):
        while (now := time.monotonic()) < start + seconds:
            state, since_last = _state_and_last(connection)
            if state != ESTABLISHED:
                return False
            if now - since_last > start + LAST_ERROR_SECONDS:
                return True
            time.sleep(PAUSE_SECONDS)  # The kernel does not announce acknowledgements.
    return False


def _state_and_last(connection: _socket.socket) -> tuple[int, float]:
    """State of a connection, and how many seconds ago the last acknowledgement came. Raises: OSError."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return info[0], struct.unpack_from("=I", info, LAST_AT)[0] / 1000


@contextmanager
def _probes(connection: _socket.socket) -> Iterator[None]:
    """Effect: within the block, the socket sends keepalive probes. Raises: OSError."""
    options = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in PROBES.items()]
    options.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
    before = [connection.getsockopt(level, option) for level, option, _ in options]
    try:
        for each in options:
            connection.setsockopt(*each)
        yield
    finally:
        for (level, option, _), value in zip(options, before, strict=True):
            connection.setsockopt(level, option, value)


def _connection(server: Server, client: Server) -> _socket.socket | None:
    """A copy of the socket of this process that has the client's end of a connection; None if it has none."""
    server, client = place_of(server), place_of(client)
    for descriptor in _sockets():
        with suppress(OSError):
            each = socket_of(descriptor)
            try:
                if _is_to(each, server) and place_of(each.getsockname()) == client:
                    return each
            except OSError:  # It is not connected.
                pass
            each.close()
    return None


def _is_to(each: _socket.socket, server: Server) -> bool:
    """Raises: OSError if a socket is not connected."""
    return each.family in (socket.AF_INET, socket.AF_INET6) and place_of(each.getpeername()) == server


def _sockets() -> list[int]:
    """The descriptors of this process's sockets."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        descriptors = list(range(MAX_DESCRIPTORS))
    return [descriptor for descriptor in descriptors if _is_socket(descriptor)]


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _listens_at(descriptor: int, port: int) -> bool:
    with suppress(OSError), closing(socket_of(descriptor)) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and found.getsockname()[1:2] == (port,)  # The name of a Unix socket is a text.
    return False  # Another thread has closed it.


def socket_of(descriptor: int) -> _socket.socket:
    """A copy of a socket. Raises: OSError.

    By itself Python would make it, and so the socket, a nonblocking one if the program has set a default timeout, as
    would a class that the program has put in place of Python's.
    """
    copy = os.dup(descriptor)
    try:
        return _socket.socket(type=socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0), fileno=copy)
    except OSError:
        os.close(copy)
        raise
