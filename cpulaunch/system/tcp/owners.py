"""Whose sockets of TCP listen on this host and have the ends of its connections, as the kernel tells (inet_diag)."""

from __future__ import annotations

import errno
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Server = tuple[str, int]
    Found = tuple[int, int, int]
    """State, user and inode of a socket. The inode is 0 before it is accepted, and once it is closed."""

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLM_F_DUMP, NLMSG_ERROR, NLMSG_DONE = 4, 20, 1, 0x300, 2, 3
ESTABLISHED, LISTEN = 1, 10
"""Source: sock_diag(7), linux/netlink.h, netinet/tcp.h."""
INET_DIAG_REQ_BYTECODE, INET_DIAG_BC_S_COND, INET_DIAG_BC_D_COND = 1, 7, 8
"""A filter of a list: conditions of the own and of the other end of a socket. Source: linux/inet_diag.h."""
LOOPBACK_INDEX = 1
"""The index of lo, without which the kernel skips listeners bound to it. Source: net/flow.h, LOOPBACK_IFINDEX."""
MAPPED = "::ffff:"
HEADER_BYTES, LENGTH_AT, KIND_AT, ERROR_AT, STATE_AT, OWNER_AT = 16, 0, 4, 16, 17, 80
"""Where an answer has its length, kind and error, or else the socket's state, and its user and inode.

Source: linux/netlink.h, linux/inet_diag.h.
"""
UNKNOWN: Found = (0, 0, 0)
"""A socket that there may be."""
TELLS_LATER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Errors that pass, some of which other users can bring about. All others are of kernels that never tell."""


def place_of(name: tuple[Any, ...]) -> Server:
    """Address, without a scope, and port of a socket's name. torch connects to addresses of IPv4 by sockets of IPv6."""
    return str(name[0]).partition("%")[0].removeprefix(MAPPED), int(name[1])


def owner_of_server(server: Server, client: Server | None = None) -> int | None:
    """The user of the socket that a client on this host reaches at one of its addresses and ports; None if unknown.

    An address of one link has the number of its interface behind "%".

    It is that of a connection, if its `client` is given, once it is accepted and as long as it is not closed; else the
    listener that the kernel would give a new connection. Users without a number in this namespace are 65534.
    Raises: OSError if it may tell later.
    """
    found = ends_of_connection(server, client) if client else [socket_at(server) or UNKNOWN]
    expected = ESTABLISHED if client else LISTEN
    users = {user for state, user, inode in found if inode and state == expected}
    return users.pop() if len(users) == 1 else None


def ends_of_connection(server: Server, client: Server) -> list[Found]:
    """The server's end of a connection, if this host has it; else the listener that would have got it, if there is one.

    A search by addresses and ports alone misses an end that is bound to a device other than lo, which every user may do
    with a socket that has accepted a connection, by a number that no device has too: then all sockets are listed.
    Raises: OSError if the kernel may tell later.
    """
    found = socket_at(server, client)
    if found is not None and found[0] != LISTEN:
        return [found]
    return _listed_ends(server, client) or ([] if found is None else [found])


def socket_at(server: Server, client: Server | None = None) -> Found | None:
    """The socket that the kernel would give a packet that comes from this client by lo; None if unknown.

    It is the listener's, if there is none of the connection.
    Source: sock_diag(7); Linux, net/ipv4/inet_diag.c, inet_diag_find_one_icsk. Raises: OSError if it may tell later.
    """
    interface, server = int(server[0].partition("%")[2] or LOOPBACK_INDEX), place_of(server)
    family = _family(server)
    try:
        [answer] = _answers(_question(family, server, client or (server[0], 0), interface), NLM_F_REQUEST)
    except (AttributeError, ValueError):  # Not Linux, or the program has put another class in place of Python's.
        return None
    except OSError as error:
        if error.errno in TELLS_LATER:
            raise
        return None
    return _found(answer)


def _listed_ends(server: Server, client: Server) -> list[Found]:
    """The sockets of this host, in any state, that have the server's end of a connection; UNKNOWN if it cannot tell.

    The kernel looks at each socket of one address under a lock. One of IPv6 with an address of IPv4 may become one of
    IPv4 meanwhile (IPV6_ADDRFORM), but never the other way round. Raises: OSError if it may tell later.
    """
    server, client = place_of(server), place_of(client)
    families = (socket.AF_INET6,) if ":" in server[0] else (socket.AF_INET6, socket.AF_INET)
    conditions = _condition(INET_DIAG_BC_D_COND, client, 0)
    conditions = _condition(INET_DIAG_BC_S_COND, server, len(conditions)) + conditions
    attribute = struct.pack("=HH", 4 + len(conditions), INET_DIAG_REQ_BYTECODE) + conditions
    found = []
    try:
        for family in families:
            question = _question(family, ("::", server[1]), ("::", client[1]), 0) + attribute
            found += [_found(answer) for answer in _answers(question, NLM_F_REQUEST | NLM_F_DUMP)]
    except (AttributeError, ValueError):
        return [UNKNOWN]
    except OSError as error:
        if error.errno in TELLS_LATER:
            raise
        return [UNKNOWN]
    return found


def _family(place: Server) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place[0] else socket.AF_INET


def _packed(place: Server) -> bytes:
    return socket.inet_pton(_family(place), place[0])


def _question(family: int, server: Server, client: Server, interface: int) -> bytes:
    """A struct inet_diag_req_v2, for sockets in any state, with any cookie. Source: linux/inet_diag.h."""
    question = struct.pack("=BBHI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    question += b"".join(port.to_bytes(2, "big") for _, port in (server, client))
    question += b"".join(_packed(place).ljust(16, b"\0") for place in (server, client))
    return question + struct.pack("=Iq", interface, -1)


def _condition(code: int, place: Server, more: int) -> bytes:
    """An instruction of a filter that drops sockets without this address and port, before so many bytes of others.

    One for IPv4 fits such an address of a socket of IPv6 too.
    Source: Linux, net/ipv4/inet_diag.c, inet_diag_bc_run; struct inet_diag_bc_op, struct inet_diag_hostcond.
    """
    address = _packed(place)
    size = 12 + len(address)
    return struct.pack("=BBHBBHi", code, size, size + more + 4, _family(place), 8 * len(address), 0, place[1]) + address


def _answers(question: bytes, flags: int) -> list[bytes]:
    """What the kernel answers: one message, or those of a list. Raises: OSError."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.connect((0, 0))  # Only the kernel can answer.
        length = HEADER_BYTES + len(question)
        kernel.send(struct.pack("=IHHII", length, SOCK_DIAG_BY_FAMILY, flags, 0, 0) + question)
        while True:
            for message in _messages(kernel.recv(1 << 16, socket.MSG_DONTWAIT)):
                _raise_error_of(message)
                if struct.unpack_from("=H", message, KIND_AT)[0] == NLMSG_DONE:
                    return answers
                answers.append(message)
            if flags == NLM_F_REQUEST:
                return answers


def _messages(answer: bytes) -> Iterator[bytes]:
    """The messages of one datagram. Source: netlink(7)."""
    while len(answer) >= HEADER_BYTES:
        length = max(struct.unpack_from("=I", answer, LENGTH_AT)[0], HEADER_BYTES)
        yield answer[:length]
        answer = answer[(length + 3) & ~3 :]


def _raise_error_of(answer: bytes) -> None:
    """Raises: OSError if this answer of the kernel is an error, or the end of a list that has one."""
    if struct.unpack_from("=H", answer, KIND_AT)[0] in (NLMSG_ERROR, NLMSG_DONE):
        number = -struct.unpack_from("=i", answer, ERROR_AT)[0]
        if number:
            raise OSError(number, os.strerror(number))


def _found(answer: bytes) -> Found:
    user, inode = struct.unpack_from("=II", answer, OWNER_AT)
    return answer[STATE_AT], int(user), int(inode)
