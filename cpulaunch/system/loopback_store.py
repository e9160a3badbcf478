"""torch's TCPStore on the loopback interface only. By itself it listens on all addresses, without authentication."""

from __future__ import annotations

import _socket
import errno
import ipaddress
import os
import re
import socket
import stat
import struct
import sys
import time
from contextlib import closing, suppress
from datetime import timedelta
from functools import wraps
from operator import index

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Server = tuple[str, int]

BACKLOG = 2048
"""Source: torch/csrc/distributed/c10d/socket.cpp."""
MASTER_POSITION = 1
"""Position of `is_master` after host and port in the arguments of TCPStore."""
LIBUV_TAKES_SOCKETS = 2, 8
"""The first version of torch whose store with libuv, its default since 2.4, can be given a socket.

Source: github.com/pytorch/pytorch, pull request 150215.
"""
RETRY_SECONDS, RETRIES = 0.02, 10
"""For a port at which another process listens for a moment only."""
MAX_DESCRIPTORS = 1 << 12
"""Descriptors looked at without /proc."""
TIMEOUT_POSITION, TIMEOUT_SECONDS = 2, 300.0
"""Position of `timeout` after host and port, and its default. Source: torch/csrc/distributed/c10d/Store.hpp."""
POLL_SECONDS, LONGEST_POLL_SECONDS, POLL_SHARE = 0.005, 0.05, 0.05
"""Pauses while a client waits for its server: this share of how long it has waited, within these limits."""
ATTEMPT_SECONDS = 3.0
"""How long a client tries to connect to a server whose listener this host does not have."""
SILENT_SECONDS = 5.0
"""After which a client that waits says that another user listens there."""
ROOT_UID = 0
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
ESTABLISHED, LISTEN = 1, 10
"""Source: sock_diag(7), linux/netlink.h, netinet/tcp.h."""
LOOPBACK_INDEX = 1
"""The index of lo, without which the kernel skips listeners bound to it. Source: net/flow.h, LOOPBACK_IFINDEX."""
MAPPED = "::ffff:"
ERROR_AT, STATE_AT, OWNER_AT = 16, 17, 80
"""Where an answer has its error, or else the socket's state, and its user and inode. Source: linux/inet_diag.h."""
TELLS_LATER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Errors that pass, some of which other users can bring about. All others are of kernels that never tell."""


class StrangerError(RuntimeError):
    """Another user has a server that this process was to use; `user`: which one, None if it has gone meanwhile."""

    def __init__(self, text: str, user: int | None = None) -> None:
        super().__init__(text)
        self.user = user


def on_loopback(make_store: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the same TCPStore. Where the name is a loopback one, it serves or reaches one address only.

    A client connects to a server of this user or root only. Where this process already serves the port, torch shares
    that store. Where another one does, the store raises RuntimeError, as torch's own does: that one would listen on all
    addresses as soon as it can.
    """

    @wraps(make_store, updated=())
    def make(host_name: str, port: int = 0, *more: Any, **options: Any) -> Any:
        serves = options.get("is_master", more[MASTER_POSITION] if len(more) > MASTER_POSITION else False)
        timeout = options.get("timeout", more[TIMEOUT_POSITION] if len(more) > TIMEOUT_POSITION else TIMEOUT_SECONDS)
        address = loopback_address(host_name) if _can_be_valid(port, timeout) else None
        host = address or host_name
        if address is not None and not serves:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            return connected(lambda at: make_store(at, port, *more, **options), [(host, index(port))], seconds)
        listening = serves and address is not None and "master_listen_fd" not in options
        listener = _retried_listener(host, port) if listening else None
        if listener is None:
            return make_store(host, port, *more, **options)
        bound = listener.getsockname()[1]
        changes: dict[str, Any] = {"master_listen_fd": listener.fileno()}
        if _version_of_torch() < LIBUV_TAKES_SOCKETS:
            changes["use_libuv"] = False
        try:
            store = make_store(host, bound, *more, **options | changes)
        except TypeError:  # This torch cannot be given a socket.
            listener.close()
            return make_store(host, port, *more, **options)
        except BaseException:
            listener.detach()  # The store has taken the descriptor over, and may have closed it.
            raise
        listener.detach()
        return store

    return make


def _can_be_valid(port: Any, timeout: Any) -> bool:
    """Whether torch takes such a port and timeout. It names what is wrong with others itself."""
    with suppress(TypeError):
        return index(port) in range(1 << 16) and isinstance(timeout, float | timedelta)
    return False


def _version_of_torch() -> tuple[int, int]:
    """Major and minor version of the torch that this process has imported; the newest that matters if there is none."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get("torch"), "__version__", "")))
    return (int(found[1]), int(found[2])) if found else LIBUV_TAKES_SOCKETS


def loopback_address(host_name: str) -> str | None:
    """The address that stands for a name, IPv4 first; None if not all of its addresses are loopback's.

    A store listens there, and its clients connect there: they would try IPv6 first, where another user may listen.
    """
    try:
        answers = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
        found = {str(each[4][0]).removeprefix(MAPPED) for each in answers}
        if not found or not all(ipaddress.ip_address(address).is_loopback for address in found):
            return None
    except (OSError, ValueError):
        return None
    return min(found, key=lambda each: (":" in each, each))


def _retried_listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens here; None if this process already has one. Raises: RuntimeError if another one has."""
    for left in reversed(range(RETRIES)):
        try:
            return loopback_listener(address, port)
        except OSError as error:  # Kept beyond this block, it would keep its frames, and the store with them.
            if error.errno == errno.EADDRINUSE and _listens(port):
                return None
            if not left:
                text = f"the store cannot listen at {address}, port {port}: {error.strerror}"
                raise RuntimeError(text) from error
        time.sleep(RETRY_SECONDS)
    return None


def loopback_listener(address: str, port: int) -> socket.socket:
    """A socket that listens at this address and port. Raises: OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listens(port: int) -> bool:
    """Whether a socket of this process listens at this TCP port."""
    return any(_listens_at(descriptor, port) for descriptor in _sockets())


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
    with suppress(OSError), closing(_socket_of(descriptor)) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and found.getsockname()[1:2] == (port,)  # The name of a Unix socket is a text.
    return False  # Another thread has closed it.


def _socket_of(descriptor: int) -> _socket.socket:
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


def connected(
    connect: Callable[[str], Any],
    servers: Sequence[Server],
    seconds: float,
    *,
    serves: bool = False,
    patient: bool = True,
) -> Any:
    """The client that `connect` makes, of a server of this user or root; of any where owners of sockets are unknown.

    It connects to the first of these addresses of this host at which such a server listens: torch's client waits
    forever for one that accepts it and says nothing. Then the connection is looked at: torch tries again if the server
    has gone meanwhile. `serves`: `connect` itself starts the server. Unless `patient`, another user who listens is an
    error at once, and a server may be on another host: at an address of that, or behind a port that root's rules
    forward. Raises: RuntimeError.
    """
    trusted = trusted_users(servers[0][0])
    if not trusted:
        return connect(servers[0][0])
    deadline = time.monotonic() + seconds
    server = servers[0] if serves else _wait_for_server(servers, trusted, seconds, patient=patient)
    others = _clients_of(server)
    store = connect(server[0])
    clients = _clients_of(server).keys() - others
    where = f"at {server[0]}, port {server[1]}"
    owners = [_owner_of_connection(server, client, trusted, deadline) for client in clients] or [None]
    for owner in owners:
        if owner is None:
            raise StrangerError(f"the server {where}, has gone or is no longer one of this user")
        if owner not in trusted:
            raise StrangerError(f"uid {owner} has accepted the connection {where}", owner)
    return store


def _wait_for_server(
    servers: Sequence[Server], trusted: frozenset[int], seconds: float, *, patient: bool = True
) -> Server:
    """The first server of a trusted user, once there is one. Effect: one line on stderr if others listen.

    Raises: torch's error, or StrangerError if another user listens, unless `patient`.
    """
    start, other, silent = time.monotonic(), None, True
    while True:
        owners = {server: owner_of_server(server) for server in servers}
        if (found := next((server for server in servers if owners[server] in trusted), None)) is not None:
            return found
        waited = time.monotonic() - start
        if not patient and not any(owners.values()):  # Of root's, 0, one would have been found.
            left = min(ATTEMPT_SECONDS, max(seconds - waited, POLL_SECONDS))
            if (found := next((each for each in servers if _leads_elsewhere(each, trusted, left)), None)) is not None:
                return found
        stranger = next((server for server in servers if owners[server] is not None), None)
        if stranger is not None:
            other, text = owners[stranger], f"uid {owners[stranger]} listens at {stranger[0]}, port {stranger[1]}"
            if not patient:
                raise StrangerError(text, other)
            if silent and waited >= SILENT_SECONDS:
                silent = False
                _say(f"{text}; waiting for rank 0 of this user or root")
        if waited >= seconds:
            raise _timeout_error(servers[0], seconds, other)
        # The kernel announces no listeners of other processes.
        time.sleep(min(max(POLL_SECONDS, waited * POLL_SHARE), LONGEST_POLL_SECONDS))


def _say(text: str) -> None:
    with suppress(OSError):  # A program without stderr, such as a service.
        os.write(2, f"cpulaunch: warning: {text}\n".encode())


def _leads_elsewhere(server: Server, trusted: frozenset[int], seconds: float) -> bool:
    """Whether a connection to this address and port is accepted, and ends on another host. Effect: makes one."""
    try:
        with socket.create_connection(server, timeout=seconds) as probe:
            return _ends_elsewhere(server, _place(probe.getsockname()), trusted)
    except OSError:
        return False


def _owner_of_connection(server: Server, client: Server, trusted: frozenset[int], deadline: float) -> int | None:
    """The user who has the server's end of this connection, once it is accepted; root if it is on another host.

    None if it is closed, or not accepted in time.
    """
    while (owner := owner_of_server(server, client)) is None:
        if _ends_elsewhere(server, client, trusted):
            return ROOT_UID  # Only root can forward what goes to an address of this host.
        if _clients_of(server).get(client) != ESTABLISHED or time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)  # The kernel does not announce when the server accepts a connection.
    return owner


def _ends_elsewhere(server: Server, client: Server, trusted: frozenset[int]) -> bool:
    """Whether this host has only the client's end of an open connection. Raises: OSError if it may tell later.

    The kernel shows the server's end before it is accepted too, except that a listener whose queue is full may have
    none: where another user listens, the connection counts as that user's. The client's end is asked for last: it is no
    longer open if the server's was closed before.
    """
    found = _socket_at(server, client)
    if found is not None and not (found[0] == LISTEN and found[1] in trusted):
        return False
    return owner_of_server(client, server) is not None


def trusted_users(address: str) -> frozenset[int]:
    """The users whose servers this process trusts, as the kernel numbers them here; none if it does not tell.

    An own socket is asked for: without its module for TCP, the kernel answers that there is none. Raises: OSError.
    """
    try:
        own = loopback_listener(address, 0)
    except OSError:  # Another user may hold all ports, which must not make that user's servers trusted ones.
        return frozenset({ROOT_UID, os.geteuid()})
    with own:
        owner = owner_of_server(own.getsockname()[:2])
    return frozenset() if owner is None else frozenset({ROOT_UID, owner})


def owner_of_server(server: Server, client: Server | None = None) -> int | None:
    """The user of the socket that a client on this host reaches at one of its addresses and ports; None if unknown.

    An address of one link has the number of its interface behind "%".

    It is that of a connection, if its `client` is given, once it is accepted and as long as it is not closed; else the
    listener that the kernel would give a new connection. Users without a number in this namespace are 65534.
    Raises: OSError if it may tell later.
    """
    state, user, inode = _socket_at(server, client) or (0, 0, 0)
    return user if inode and state == (ESTABLISHED if client else LISTEN) else None


def _socket_at(server: Server, client: Server | None) -> tuple[int, int, int] | None:
    """State, user and inode of the socket that the kernel would give a packet of this client; None if unknown.

    It is the listener's, if there is none of the connection. The inode is 0 before it is accepted.
    Source: sock_diag(7); Linux, net/ipv4/inet_diag.c, inet_diag_find_one_icsk. Raises: OSError if it may tell later.
    """
    interface, server = int(server[0].partition("%")[2] or LOOPBACK_INDEX), _place(server)
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    places = [(server[0], server[1]), client or (server[0], 0)]
    question = struct.pack("=BBHI", family, socket.IPPROTO_TCP, 0, 0)
    question += b"".join(port.to_bytes(2, "big") for _, port in places)
    question += b"".join(socket.inet_pton(family, address).ljust(16, b"\0") for address, _ in places)
    question += struct.pack("=Iq", interface, -1)  # Any cookie.
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.connect((0, 0))  # Only the kernel can answer.
            kernel.send(struct.pack("=IHHII", 16 + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + question)
            answer = kernel.recv(1 << 12, socket.MSG_DONTWAIT)
        _raise_error_of(answer)
    except (AttributeError, ValueError):  # Not Linux, or the program has put another class in place of Python's.
        return None
    except OSError as error:
        if error.errno in TELLS_LATER:
            raise
        return None
    user, inode = struct.unpack_from("=II", answer, OWNER_AT)
    return answer[STATE_AT], int(user), int(inode)


def _raise_error_of(answer: bytes) -> None:
    """Raises: OSError if this answer of the kernel is an error."""
    if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, ERROR_AT)[0]
        raise OSError(number, os.strerror(number))


def _clients_of(server: Server) -> dict[Server, int]:
    """Address and port of each connection that this process has to a server, and its state."""
    found, server = {}, _place(server)
    for descriptor in _sockets():
        with suppress(OSError), closing(_socket_of(descriptor)) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and _place(each.getpeername()) == server:
                state = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]  # An error if it is not of TCP.
                found[_place(each.getsockname())] = state
    return found


def _place(name: tuple[Any, ...]) -> Server:
    """Address, without a scope, and port of a socket's name. torch connects to addresses of IPv4 by sockets of IPv6."""
    return str(name[0]).partition("%")[0].removeprefix(MAPPED), int(name[1])


def _timeout_error(server: Server, seconds: float, owner: int | None) -> Exception:
    """torch's own error, and who listens there. Source: torch/csrc/distributed/c10d/socket.cpp, throwTimeoutError."""
    kind = getattr(getattr(sys.modules.get("torch"), "distributed", None), "DistNetworkError", RuntimeError)
    where = f"({server[0]}, {server[1]})"
    text = f"The client socket has timed out after {seconds * 1000:.0f}ms while trying to connect to {where}."
    error: Exception = kind(text if owner is None else f"{text} Another user listened there, with uid {owner}.")
    return error
