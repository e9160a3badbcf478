"""The network interface between ranks, and what the ranks tell each other before they connect."""

from __future__ import annotations

import os
import socket

from cpulaunch.records.ccl_defaults import GLOO_INTERFACE
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

DEFAULT_ROUTE_ADDRESS = "192.0.2.1"
"""An address that no machine has, so packets to it take the default route. Source: RFC 5737, TEST-NET-1."""


def this_host() -> str:
    """This host's name, a space, and an identifier of this boot and of the mounted /dev/shm; empty if unknown.

    ASCII, as the store takes UTF-8, and a name may be any bytes. Source: random(4), boot_id.
    """
    name = ascii(socket.gethostname())[1:-1]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{name} {file.read().strip()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return f"{name} "


def check_hosts(hosts: Sequence[str]) -> None:
    """Raises: UnavailableError if two of these hosts, as in this_host, have the same name.

    oneCCL would treat them as one, and wait forever for data in shared memory.
    """
    names = [host.partition(" ")[0] for host in sorted(set(hosts))]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        hint = "hint: give every host a unique name (hostname, docker run --hostname), or use gloo"
        raise UnavailableError(
            f"two hosts have the same name, which oneCCL uses to distinguish them: {repeated}\n{hint}"
        )


def interfaces(environ: Mapping[str, str]) -> str:
    """The network interfaces to use, comma-separated, the preferred first; empty if unknown.

    They are those set for gloo, or else the one that leads to MASTER_ADDR.
    """
    requested, master = environ.get(GLOO_INTERFACE, ""), environ.get("MASTER_ADDR", "")
    return requested or (_interface_towards(master, alone=_is_single_host(environ)) if master else "")


def own_address(environ: Mapping[str, str]) -> str:
    """This host's address on the interface to use, IPv4 first. Raises: CclError if there is none."""
    name = interfaces(environ).split(",")[0] or ("lo" if _is_single_host(environ) else "")
    addresses = _addresses().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in addresses:
            if each.family == family and "%" not in each.address:
                return str(each.address)
    hint = f"hint: {GLOO_INTERFACE} must name the interface that leads to the other hosts"
    raise CclError(f"the network interface has no address: {name or 'none is known'}\n{hint}")


def _addresses() -> Mapping[str, Sequence[Any]]:
    """The addresses of each interface. Raises: CclError without psutil, in a Python of the user's choice."""
    try:
        import psutil
    except ImportError as error:
        raise CclError(f"{error}\nhint: pip install psutil") from None
    return psutil.net_if_addrs()


def _is_single_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host."""
    return environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")


def _interface_towards(host: str, *, alone: bool) -> str:
    """The interface through which packets to a host leave; empty if unknown. `alone`: all ranks are on this host.

    Sends no packet: to connect a datagram socket only looks up the route.
    """
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        if _is_loopback(str(address)) and not alone:  # This host, which others reach through another interface.
            family, address = socket.AF_INET, DEFAULT_ROUTE_ADDRESS
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    if _is_loopback(source):
        return "lo"
    found = (name for name, rows in _addresses().items() if any(row.address == source for row in rows))
    return next(found, "")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
