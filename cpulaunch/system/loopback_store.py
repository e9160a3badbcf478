"""torch's TCPStore on the loopback interface only. By itself it listens on all addresses, without authentication."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
import sys
import time
from contextlib import suppress
from functools import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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


def on_loopback(make_store: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the same TCPStore. Where the name is a loopback one, it serves or reaches one address only.

    Where this process already serves the port, torch shares that store. Where another one does, the store raises
    RuntimeError, as torch's own does: that one would listen on all addresses as soon as it can.
    """

    @wraps(make_store, updated=())
    def make(host_name: str, port: int = 0, *more: Any, **options: Any) -> Any:
        serves = options.get("is_master", more[MASTER_POSITION] if len(more) > MASTER_POSITION else False)
        address = loopback_address(host_name)
        host = address or host_name
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


def _version_of_torch() -> tuple[int, int]:
    """Major and minor version of the torch that this process has imported; the newest that matters if there is none."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get("torch"), "__version__", "")))
    return (int(found[1]), int(found[2])) if found else LIBUV_TAKES_SOCKETS


def loopback_address(host_name: str) -> str | None:
    """The address that stands for a name, IPv4 first; None if not all of its addresses are loopback's.

    A store listens there, and its clients connect there: they would try IPv6 first, where another user may listen.
    """
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)}
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
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        descriptors = list(range(MAX_DESCRIPTORS))
    return any(_is_socket(descriptor) and _listens_at(descriptor, port) for descriptor in descriptors)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _listens_at(descriptor: int, port: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and found.getsockname()[1:2] == (port,)  # The name of a Unix socket is a text.
    return False  # Another thread has closed it.
