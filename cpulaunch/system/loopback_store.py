"""torch's TCPStore on the loopback interface only. By itself it listens on all addresses, without authentication."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from operator import index

from cpulaunch.system.tcp.connections import clients_of, listens
from cpulaunch.system.tcp.owners import ESTABLISHED, MAPPED, owner_of_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from cpulaunch.system.tcp.owners import Server

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
TIMEOUT_POSITION, TIMEOUT_SECONDS = 2, 300.0
"""Position of `timeout` after host and port, and its default. Source: torch/csrc/distributed/c10d/Store.hpp."""
POLL_SECONDS, LONGEST_POLL_SECONDS, POLL_SHARE = 0.005, 0.05, 0.05
"""Pauses while a client waits for its server: this share of how long it has waited, within these limits."""
ATTEMPT_SECONDS = 3.0
"""How long a client tries to connect to a server whose listener this host does not show."""
SILENT_SECONDS = 5.0
"""After which a client that waits says that another user listens there."""
ACCEPTED_SECONDS = 60.0
"""How long a connection may lack its other end, as while the server's queue is full."""
FORWARDED = "if the port is forwarded, name the address behind it"
ROOT_UID = 0


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
            if error.errno == errno.EADDRINUSE and listens(port):
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


def connected(
    connect: Callable[[str], Any],
    servers: Sequence[Server],
    seconds: float,
    *,
    serves: bool = False,
    patient: bool = True,
    others: Sequence[Server] = (),
) -> Any:
    """The client that `connect` makes, of a server of this user or root; of any where owners of sockets are unknown.

    It connects to the first of these addresses of this host at which such a server listens: torch's client waits
    forever for one that accepts it and says nothing. Then the connection is looked at: torch tries again if the server
    has gone meanwhile. `serves`: `connect` itself starts the server. Unless `patient`, another user who listens is an
    error at once, and a server may be at one of the `others`, which are addresses of other hosts. At one of this host,
    no server is used that this host does not show, as behind a port that root's rules forward: every user can hide.
    Raises: RuntimeError, or OSError if owners may be known later.
    """
    trusted = trusted_users(servers[0][0])
    if not trusted:
        return connect(servers[0][0])
    end = time.monotonic() + seconds
    server = servers[0] if serves else _wait_for_server(servers, trusted, seconds, patient=patient, others=others)
    if server in others:
        return connect(server[0])
    before = clients_of(server)
    store = connect(server[0])
    clients = clients_of(server).keys() - before
    where = f"at {server[0]}, port {server[1]}"
    deadline = min(end, time.monotonic() + ACCEPTED_SECONDS)
    owners = [_owner_of_connection(server, each, deadline) for each in clients] or [None]
    for owner in owners:
        if owner is None:
            raise StrangerError(f"the server {where}, has gone or is not one of this user; {FORWARDED}")
        if owner not in trusted:
            raise StrangerError(f"uid {owner} has accepted the connection {where}", owner)
    return store


def _wait_for_server(
    servers: Sequence[Server],
    trusted: frozenset[int],
    seconds: float,
    *,
    patient: bool = True,
    others: Sequence[Server] = (),
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
            found = _accepting([*others, *(servers if waited >= SILENT_SECONDS else ())], start + seconds)
            if found is not None and found in others:
                return found
            if found is not None and owner_of_server(found) is None:
                raise StrangerError(f"what accepts connections at {found[0]}, port {found[1]}, is hidden; {FORWARDED}")
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
        _pause(waited)  # The kernel announces no listeners of other processes.


def _pause(waited: float) -> None:
    time.sleep(min(max(POLL_SECONDS, waited * POLL_SHARE), LONGEST_POLL_SECONDS))


def _say(text: str) -> None:
    with suppress(OSError):  # A program without stderr, such as a service.
        os.write(2, f"cpulaunch: warning: {text}\n".encode())


def _accepting(servers: Sequence[Server], deadline: float) -> Server | None:
    """The first of these servers that accepts a connection; None if none does.

    Effect: makes connections, and takes no longer than the deadline, or a moment for each.
    """
    for server in servers:
        left = min(ATTEMPT_SECONDS, max(deadline - time.monotonic(), POLL_SECONDS))
        with suppress(OSError), socket.create_connection(server, timeout=left):
            return server
    return None


def _owner_of_connection(server: Server, client: Server, deadline: float) -> int | None:
    """The user who has the server's end of this connection, once it is accepted; None if it is closed, or not in time.

    None too if this host has no such end, as if root's rules forward the port: a user can close one in secret, bound to
    another device, and have another one made later, by a listener with SYN cookies.
    """
    start = time.monotonic()
    while (owner := owner_of_server(server, client)) is None:
        if clients_of(server).get(client) != ESTABLISHED or time.monotonic() >= deadline:
            return None
        _pause(time.monotonic() - start)  # The kernel does not announce when the server accepts a connection.
    return owner


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


def _timeout_error(server: Server, seconds: float, owner: int | None) -> Exception:
    """torch's own error, and who listens there. Source: torch/csrc/distributed/c10d/socket.cpp, throwTimeoutError."""
    kind = getattr(getattr(sys.modules.get("torch"), "distributed", None), "DistNetworkError", RuntimeError)
    where = f"({server[0]}, {server[1]})"
    text = f"The client socket has timed out after {seconds * 1000:.0f}ms while trying to connect to {where}."
    error: Exception = kind(text if owner is None else f"{text} Another user listened there, with uid {owner}.")
    return error
