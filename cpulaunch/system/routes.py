"""Through which network interface this machine reaches the place where the hosts of a job meet."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import time

from cpulaunch.records.endpoint import is_loopback_name, split_endpoint
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIOCGIFCONF = 0x8912
"""Source: Linux, include/uapi/linux/sockios.h; netdevice(7)."""

ANYWHERE = "192.0.2.1"
"""An address of no machine: the way there is the default route. Source: RFC 5737, TEST-NET-1."""

MAX_ADDRESSES = 1024
RETRY_SECONDS = 0.5


@record(kw_only=False)
class Route:
    """This machine's address on the way there, and the interface that has it; None where that cannot be told."""

    address: str
    interface: str | None


def route_to(endpoint: str, *, source: str, patience_seconds: float, notify: Callable[[str], None]) -> Route | None:
    """The way to HOST[:PORT]; None where there is none.

    A name may appear late (a pod that starts before its service), so it is asked for again until `patience_seconds`
    have passed. Raises: ProbeError if it does not resolve, naming `source`.
    """
    host, _ = split_endpoint(endpoint, default_port=1)
    family, address = _resolved(host, source=source, patience_seconds=patience_seconds, notify=notify)
    if is_loopback_name(address) and not is_loopback_name(host):
        # A machine's own name, which /etc/hosts often maps to 127.0.1.1: the others come in from elsewhere.
        family, address = socket.AF_INET, ANYWHERE
    own = _source_address(family, address)
    return None if own is None else Route(own, _interface_with(own))


def _resolved(
    host: str, *, source: str, patience_seconds: float, notify: Callable[[str], None]
) -> tuple[socket.AddressFamily, str]:
    """The first address of a host. Effect: waits for it, after one line to `say`. Raises: ProbeError."""
    deadline = time.monotonic() + patience_seconds
    waiting = False
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no valid host name"
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                raise ProbeError(
                    "host name does not resolve",
                    value=host,
                    source=f"{source}; {reason}",
                    hint=f"`getent hosts {host}` must print an address on every host of the job",
                ) from None
        if not waiting:
            waiting = True
            notify(f"waiting for the host name {host} to resolve (at most {patience_seconds:g} s)")
        time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _source_address(family: socket.AddressFamily, address: str) -> str | None:
    """The address this machine would send from; no packet is sent (a datagram socket only looks up the route)."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _interface_with(address: str) -> str | None:
    """The interface with this address, by the name getifaddrs(3) gives it, as gloo asks for it."""
    if is_loopback_name(address):
        return "lo"
    return _interfaces_v6().get(address) if ":" in address else _interfaces_v4().get(address)


def _interfaces_v4() -> dict[str, str]:
    """IPv4 addresses to names, an address of an alias to its label (eth0:1). Source: netdevice(7), SIOCGIFCONF."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    size = 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(size * MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        try:
            length = struct.unpack("iP", ioctl(probe, SIOCGIFCONF, request))[0]
        except OSError:
            return {}
    entries = (buffer[at : at + size].tobytes() for at in range(0, length, size))
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode() for entry in entries}


def _interfaces_v6() -> dict[str, str]:
    """IPv6 addresses to names. Source: proc(5), /proc/net/if_inet6: address, index, length, scope, flags, name."""
    if not os.path.exists("/proc/net/if_inet6"):
        return {}
    with open("/proc/net/if_inet6") as file:
        rows = [line.split() for line in file]
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[-1] for row in rows if len(row) == 6}
