"""The sockets of TCP that this process has, also those that torch has opened."""

from __future__ import annotations

import _socket
import os
import socket
import stat
from contextlib import closing, suppress

from cpulaunch.system.tcp.owners import place_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.system.tcp.owners import Server

MAX_DESCRIPTORS = 1 << 12
"""Descriptors looked at without /proc."""


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
