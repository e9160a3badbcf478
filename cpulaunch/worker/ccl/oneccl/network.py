"""The network interface between ranks, and what the ranks tell each other before they connect."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from cpulaunch.records.ccl_defaults import GLOO_INTERFACE
from cpulaunch.records.endpoint import is_loopback_name
from cpulaunch.system.routes import ANYWHERE, source_address
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError


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

    They are those set for gloo, or else the one through which packets to MASTER_ADDR leave.
    """
    requested, master = environ.get(GLOO_INTERFACE, ""), environ.get("MASTER_ADDR", "")
    if requested or not master:
        return requested
    try:
        family, *_, (address, *_) = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        if is_loopback_name(str(address)) and not _is_single_host(environ):
            family, address = socket.AF_INET, ANYWHERE  # Others reach this host through another interface.
        source = source_address(family, str(address))
    except OSError:
        return ""
    if source is None or is_loopback_name(source):
        return "lo" if source else ""
    return next((name for name, rows in _addresses().items() if any(row.address == source for row in rows)), "")


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
