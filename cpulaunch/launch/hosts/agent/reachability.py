"""Whether the rendezvous endpoint is on this host, and if not, whether it accepts connections; without torch."""

from __future__ import annotations

import socket
import time

from cpulaunch.records.endpoint import is_loopback_name
from cpulaunch.records.errors import LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RETRY_SECONDS = 0.3
ATTEMPT_SECONDS = 5.0
"""A firewall that drops packets leaves one attempt without an answer for two minutes; a new one may get through."""
NOTIFY_AFTER_SECONDS = 5.0
"""Hosts do not start at the same moment; only a longer wait is worth a line."""


def addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that a host name resolves to, each once. Raises: OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((entry[0], str(entry[4][0])) for entry in found))


def is_this_host(host: str) -> bool:
    """Whether a name is this host's own: packets to one of its addresses would come from that same address.

    torch asks whether the name is the host's FQDN instead, and misses every other address of the host.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return any(is_loopback_name(address) or _is_own(family, address) for family, address in addresses(host))
    except (OSError, UnicodeError):
        return False


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # Looks up the route; nothing is sent.
        except OSError:
            return False
        return bool(probe.getsockname()[0] == address)


def wait_until_reachable(host: str, port: int, *, timeout_seconds: float, notify: Callable[[str], None]) -> None:
    """Effect: returns once a server accepts connections there. Raises: LaunchError after the timeout."""
    start = now = time.monotonic()
    deadline = start + timeout_seconds
    notified = False
    while reason := connect_error(host, port, timeout_seconds=min(ATTEMPT_SECONDS, max(0.1, deadline - now))):
        now = time.monotonic()
        if now >= deadline:
            raise unreachable_error(host, port, reason=f"{reason}, for {timeout_seconds:g} s")
        if not notified and now - start >= NOTIFY_AFTER_SECONDS:
            notified = True
            notify(f"waiting for {host}:{port} ({reason}), at most {timeout_seconds:g} s")
        time.sleep(min(RETRY_SECONDS, deadline - now))
        now = time.monotonic()


def connect_error(host: str, port: int, *, timeout_seconds: float) -> str | None:
    """Why no connection can be made; None if one can."""
    try:
        socket.create_connection((host, port), timeout=timeout_seconds).close()
    except TimeoutError:
        return "no answer"
    except socket.gaierror as error:
        return f"the name does not resolve: {error.strerror}"
    except (OSError, UnicodeError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return None


def unreachable_error(host: str, port: int, *, reason: str) -> LaunchError:
    """The error for an endpoint that accepts no connection."""
    return LaunchError(
        "the rendezvous endpoint cannot be reached",
        value=f"{host}:{port}",
        source=reason,
        hint=f"check that cpulaunch runs on that host and that its firewall opens port {port}",
    )
