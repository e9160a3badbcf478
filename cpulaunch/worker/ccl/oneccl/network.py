"""The network interface between ranks, and a check that hosts have unique names."""

from __future__ import annotations

import os
import socket

from cpulaunch.records.ccl_defaults import GLOO_INTERFACE
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

PROBLEM = "!"
"""First character of a value in the store that says why a rank cannot join the others."""
DEFAULT_ROUTE_ADDRESS = "192.0.2.1"
"""An address that no machine has, so packets to it take the default route. Source: RFC 5737, TEST-NET-1."""


def interfaces(environ: Mapping[str, str]) -> str:
    """The network interfaces to use, comma-separated, the preferred first; empty if unknown.

    They are those set for gloo, or else the one that leads to MASTER_ADDR.
    """
    requested = environ.get(GLOO_INTERFACE, "")
    master = environ.get("MASTER_ADDR", "")
    return requested or (_interface_towards(master, alone=_is_single_host(environ)) if master else "")


def _addresses() -> Mapping[str, Sequence[Any]]:
    """The addresses of each interface. Raises: CclError without psutil, in a Python of the user's choice."""
    try:
        import psutil
    except ImportError as error:
        raise CclError(f"{error}\nhint: pip install psutil") from None
    return psutil.net_if_addrs()


def own_address(environ: Mapping[str, str]) -> str:
    """This host's address on the interface to use, IPv4 first. Raises: CclError if there is none."""
    name = interfaces(environ).split(",")[0] or ("lo" if _is_single_host(environ) else "")
    addresses = _addresses().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [each.address for each in addresses if each.family == family and "%" not in each.address]
        if found:
            return str(found[0])
    hint = f"hint: {GLOO_INTERFACE} must name the interface that leads to the other hosts"
    raise CclError(f"the network interface has no address: {name or 'none is known'}\n{hint}")


def check_hosts(store: Any, *, rank: int, size: int, problem: str = "", host: str | None = None) -> None:
    """Effect: waits until all ranks have published their host under the store's keys hosts/*.

    `problem` is why this rank cannot use oneCCL; `host` is this host's name and kernel, for tests.
    Raises: UnavailableError, in all ranks, if one has a problem; CclError, in all ranks, if two hosts have the same
    name: oneCCL would treat them as one, and wait forever for data in shared memory.
    """
    hosts = agreed(store, "hosts", host or f"{_host_name()} {_kernel()}", rank=rank, size=size, problem=problem)
    names = [each.partition(" ")[0] for each in sorted(set(hosts))]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        hint = "hint: give every host a unique name (hostname, docker run --hostname), or use gloo"
        raise CclError(f"two hosts have the same name, which oneCCL uses to distinguish them: {repeated}\n{hint}")


def agreed(store: Any, key: str, value: str, *, rank: int, size: int, problem: str) -> list[str]:
    """The values that all ranks publish. Raises: UnavailableError, in all ranks, if one has a problem."""
    store.set(f"{key}/{rank}", f"{PROBLEM}rank {rank}: {problem}" if problem else value)
    values: list[str] = [each.decode() for each in store.multi_get([f"{key}/{other}" for other in range(size)])]
    for each in values:
        if each.startswith(PROBLEM):
            raise UnavailableError(each.removeprefix(PROBLEM))
    return values


def _host_name() -> str:
    """This host's name in ASCII: the store takes UTF-8, and a name may be any bytes."""
    return ascii(socket.gethostname())[1:-1]


def _kernel() -> str:
    """An identifier of this boot and of the mounted /dev/shm; empty if unknown. Source: random(4), boot_id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def _is_single_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host."""
    return environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")


def _interface_towards(host: str, *, alone: bool) -> str:
    """The interface through which packets to a host leave; empty if unknown. `alone`: all ranks are on this host.

    Sends no packet: to connect a datagram socket only looks up the route.
    """
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        address = str(socket_address[0])
        if (
            _is_loopback(address) and not alone
        ):  # The host is this one, but other hosts reach it through another interface.
            family, address = socket.AF_INET, DEFAULT_ROUTE_ADDRESS
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return _interface_with(str(probe.getsockname()[0]))
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_with(address: str) -> str:
    """The interface that has an address; empty if none has."""
    if _is_loopback(address):
        return "lo"
    found = (name for name, rows in _addresses().items() if any(row.address == address for row in rows))
    return next(found, "")
