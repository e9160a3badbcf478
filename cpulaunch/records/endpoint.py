"""The address where the hosts of a job meet, taken apart."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")


def split_endpoint(endpoint: str, *, default_port: T) -> tuple[str, int | T]:
    """The host and the port of HOST, HOST:PORT or [IPV6]:PORT (or as torchrun has it, IPV6:PORT); none is localhost.

    Raises: UsageError if the port is none. Source: torch elastic, parse_rendezvous_endpoint.
    """
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]") or _is_bare_ipv6(text):
        return text.strip("[]") or "localhost", default_port
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError("no such port", value=port, source=f"rendezvous endpoint {text}", hint="HOST:PORT, 0 to 65535")
    return host.strip("[]") or "localhost", int(port)


def with_brackets(endpoint: str) -> str:
    """The endpoint as torch reads it: it takes the last group of a bare IPv6 address for a port, and waits there."""
    return f"[{endpoint.strip()}]" if _is_bare_ipv6(endpoint.strip()) else endpoint


def _is_bare_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address without brackets, and without a port: no group of one has five digits."""
    return text.count(":") > 1 and not text.startswith("[") and len(text.rpartition(":")[2]) < 5


def is_loopback_name(host: str) -> bool:
    """Whether this name means the machine itself, wherever it is said."""
    return host == "localhost" or host == "::1" or host.startswith("127.")
