"""torch's TCPStore on the loopback interface only. By itself it listens on all addresses, without authentication."""

from __future__ import annotations

import ipaddress
import socket
from functools import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BACKLOG = 2048
"""Source: torch/csrc/distributed/c10d/socket.cpp."""
MASTER_POSITION = 1
"""Position of `is_master` after host and port in the arguments of TCPStore."""


def on_loopback(make_store: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the same TCPStore, whose server listens on loopback where the name is a loopback one.

    Where no loopback listener can be had, as when this process already serves a store at the port, torch's own applies.
    """

    @wraps(make_store, updated=())
    def make(host_name: str, port: int = 0, *more: Any, **options: Any) -> Any:
        serves = options.get("is_master", more[MASTER_POSITION] if len(more) > MASTER_POSITION else False)
        listener = None if not serves or "master_listen_fd" in options else loopback_listener(host_name, port)
        if listener is None:
            return make_store(host_name, port, *more, **options)
        bound = listener.getsockname()[1]
        try:
            store = make_store(host_name, bound, *more, **options, master_listen_fd=listener.fileno())
        except TypeError:  # This torch cannot be given a socket.
            listener.close()
            return make_store(host_name, port, *more, **options)
        except BaseException:
            listener.detach()  # The store has taken the descriptor over, and may have closed it.
            raise
        listener.detach()
        return store

    return make


def loopback_listener(host_name: str, port: int) -> socket.socket | None:
    """A socket that listens at this name and port; None if the name is not loopback's only, or the port is taken."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)}
        if not found or not all(ipaddress.ip_address(address).is_loopback for address in found):
            return None
        address = min(found, key=lambda each: ":" in each)  # IPv4 first: every client tries both families.
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener
