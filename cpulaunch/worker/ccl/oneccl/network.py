"""The network interface between ranks, where the launch has not set it."""

from __future__ import annotations

import os
import socket

from cpulaunch.records.ccl_defaults import GLOO_INTERFACE
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

DEFAULT_ROUTE_ADDRESS = "192.0.2.1"
"""An address of no machine: the way there is the default route. Source: RFC 5737, TEST-NET-1."""


def interfaces(environ: Mapping[str, str]) -> str:
    """The interfaces to use, comma-separated, the best first; empty if that is unknown.

    They are gloo's, or else the one on the way to the master's address.
    """
    asked = environ.get(GLOO_INTERFACE, "")
    master = environ.get("MASTER_ADDR", "")
    return asked or (_interface_towards(master, alone=_is_single_host(environ)) if master else "")


def own_address(environ: Mapping[str, str]) -> str:
    """This host's address on the interface to use, IPv4 first. Raises: CclError if it cannot be told."""
    import psutil

    name = interfaces(environ).split(",")[0]
    places = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [place.address for place in places if place.family == family and "%" not in place.address]
        if found:
            return str(found[0])
    hint = f"hint: {GLOO_INTERFACE} must name the interface that leads to the other hosts"
    raise CclError(f"the network interface has no address: {name or 'none is known'}\n{hint}")


def check_host_names(store: Any, *, rank: int, size: int, place: str | None = None) -> None:
    """Effect: all ranks have said where they are; uses the store's keys hosts/*. `place`: this host's name and kernel.

    Raises: CclError, in all of them, if two hosts have one name: oneCCL would wait forever for what the other never
    puts into this host's memory.
    """
    store.set(f"hosts/{rank}", place or f"{socket.gethostname()} {_kernel()}")
    said = {each.decode() for each in store.multi_get([f"hosts/{other}" for other in range(size)])}
    names = [each.partition(" ")[0] for each in sorted(said)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "hint: give every host a unique name (hostname, docker run --hostname), or use gloo"
        raise CclError(f"two hosts have the same name, which oneCCL uses to distinguish them: {twice}\n{hint}")


def _kernel() -> str:
    """What tells this machine, and what its processes share of /dev/shm, from others. Source: random(4), boot_id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def _is_single_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host."""
    return environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")


def _interface_towards(host: str, *, alone: bool) -> str:
    """The interface that packets to a host leave by; none is sent (a datagram socket only looks up the route)."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        address = str(place[0])
        if _is_loopback(address) and not alone:  # This machine's own name; the others come in from elsewhere.
            family, address = socket.AF_INET, DEFAULT_ROUTE_ADDRESS
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return _with_address(str(probe.getsockname()[0]))
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _with_address(address: str) -> str:
    if _is_loopback(address):
        return "lo"
    import psutil

    found = (name for name, places in psutil.net_if_addrs().items() if any(p.address == address for p in places))
    return next(found, "")
