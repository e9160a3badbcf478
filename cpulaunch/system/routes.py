"""The network interface through which this machine reaches the rendezvous of a job."""

from __future__ import annotations

import errno
import socket
import time

from cpulaunch.records.endpoint import is_loopback_name, split_endpoint
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ANYWHERE = "192.0.2.1"
"""An address that no machine has, so that packets to it take the default route. Source: RFC 5737, TEST-NET-1."""

RETRY_SECONDS = 0.5


@record(kw_only=False)
class Route:
    """This machine's address on the route, and the interface that has it; None where that is unknown."""

    address: str
    interface: str | None


def route_to(endpoint: str, *, source: str, patience_seconds: float, notify: Callable[[str], object]) -> Route | None:
    """The route to HOST[:PORT]; None if there is no route.

    A name may appear late (a pod that starts before its service), so it is looked up again until `patience_seconds`
    have passed. Raises: ProbeError, naming `source`, if it does not resolve.
    """
    host, _ = split_endpoint(endpoint, default_port=1)
    family, address = _resolved(host, source=source, patience_seconds=patience_seconds, notify=notify)
    if is_loopback_name(address) and not is_loopback_name(host):
        # /etc/hosts often maps a machine's own name to 127.0.1.1, which other hosts cannot reach.
        family, address = socket.AF_INET, ANYWHERE
    own = source_address(family, address)
    return None if own is None else Route(own, _interface_with(own))


def _resolved(
    host: str, *, source: str, patience_seconds: float, notify: Callable[[str], object]
) -> tuple[socket.AddressFamily, str]:
    """The first address of a host. Effect: one line to `notify` if it has to wait for it. Raises: ProbeError."""
    deadline = time.monotonic() + patience_seconds
    waiting = False
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "invalid host name"
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                raise ProbeError(
                    "host name does not resolve",
                    value=host,
                    source=f"{source}; {reason}",
                    hint=f"check `getent hosts {host}` on every host of the job",
                ) from None
        if not waiting:
            waiting = True
            notify(f"waiting up to {patience_seconds:g} s for host name {host} to resolve")
        time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def source_address(family: socket.AddressFamily, address: str) -> str | None:
    """The address this machine would send from. No packet is sent: connecting a datagram socket looks up the route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _interface_with(address: str) -> str | None:
    """The name of the interface with this address as getifaddrs(3) gives it, which gloo compares with; "eth0:1" for
    an alias. None if there is none, or if a sandbox does not list interfaces.
    """
    import psutil  # Takes 20 ms; only jobs of several hosts need it.

    try:
        interfaces = psutil.net_if_addrs().items()
    except OSError:
        return None
    return next((name for name, own in interfaces if any(_plain(each.address) == address for each in own)), None)


def _plain(address: str) -> str:
    """An address without the zone that psutil adds to link-local ones ("fe80::1%eth0")."""
    return address.partition("%")[0]
