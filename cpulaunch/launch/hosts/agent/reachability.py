"""Whether the rendezvous endpoint is on this host, and if not, whether it accepts connections; without torch."""

from __future__ import annotations

import socket
import time

from cpulaunch.records.endpoint import is_loopback_name
from cpulaunch.records.errors import LaunchError
from cpulaunch.system.tcp.owners import TELLS_LATER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RETRY_SECONDS = 0.3
ATTEMPT_SECONDS = 5.0
"""A firewall that drops packets leaves one attempt without an answer for two minutes; a new one may get through."""
NOTIFY_AFTER_SECONDS = 5.0
"""Hosts do not start at the same moment; only a longer wait is worth a line."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where connections to these addresses lead on Linux."""


def addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that a host name resolves to, each once; of one link with its interface. Raises: OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((entry[0], _with_scope(*entry[4])) for entry in found))


def _with_scope(address: str | int, port: int | bytes, flow: int = 0, scope: int = 0) -> str:
    """The address of a socket's name as text. Python's leaves out the scope, which torch needs too."""
    return f"{str(address).partition('%')[0]}%{scope}" if scope else str(address)


def is_this_host(host: str) -> bool:
    """Whether a name is this host's own: packets to one of its addresses would come from that same address.

    torch asks whether the name is the host's FQDN instead, and misses every other address of the host.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return any(_is_own(family, address) for family, address in addresses(host))
    except (OSError, UnicodeError):
        return False


def own_and_other_addresses(host: str, *, timeout_seconds: float) -> tuple[list[str], list[str]]:
    """Those addresses of a name to which packets do not leave this host, of IPv4 first, and the others.

    A name service that cannot answer now is asked again for this long. Raises: OSError, or UnicodeError.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            found = addresses(host)
            break
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)
    own = [(family, address) for family, address in found if address in LOOPBACK or _is_own(family, address)]
    own.sort(key=lambda each: each[0] != socket.AF_INET)
    others = [address for family, address in found if (family, address) not in own]
    return [LOOPBACK.get(address, address) for _, address in own], others


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    """Raises: OSError if this cannot be known now, as other users may bring about."""
    if is_loopback_name(address):
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            *_, place = socket.getaddrinfo(address, 9, family, flags=socket.AI_NUMERICHOST)[0]
            probe.connect(place)  # Looks up the route; nothing is sent.
        except OSError as error:
            if error.errno in TELLS_LATER:
                raise
            return False
        own = str(probe.getsockname()[0])
        return own.partition("%")[0] == address.partition("%")[0]


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
    except (OSError, UnicodeError) as error:
        return reason_of(error)
    return None


def reason_of(error: OSError | UnicodeError) -> str:
    """Why a name has no address or an address accepts no connection, as text."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve: {error.strerror}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def unreachable_error(host: str, port: int, *, reason: str) -> LaunchError:
    """The error for an endpoint that accepts no connection."""
    return LaunchError(
        "the rendezvous endpoint cannot be reached",
        value=f"{host}:{port}",
        source=reason,
        hint=f"check that cpulaunch runs on that host and that its firewall opens port {port}",
    )
