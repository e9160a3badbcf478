"""The address where the hosts of a job meet, taken apart."""

from __future__ import annotations

from cpulaunch.errors import UsageError


def split_endpoint(endpoint: str, *, default_port: int) -> tuple[str, int]:
    """The host and the port of HOST, HOST:PORT or [IPV6]:PORT; an empty host is localhost.

    Raises: UsageError if the port is none. Source: torch elastic, parse_rendezvous_endpoint.
    """
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]") or _is_bare_ipv6(text):
        return text.strip("[]") or "localhost", default_port
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError("no such port", value=port, source=f"rendezvous endpoint {text}", hint="HOST:PORT, 0 to 65535")
    return host.strip("[]") or "localhost", int(port)


def _is_bare_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address without brackets, and so without a port."""
    return text.count(":") > 1 and not text.startswith("[")


def is_loopback_name(host: str) -> bool:
    """Whether this name means the machine itself, wherever it is said."""
    return host == "localhost" or host == "::1" or host.startswith("127.")
