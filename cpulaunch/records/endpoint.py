"""Parsing of rendezvous endpoints: the address where the hosts of a job find each other."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    T = TypeVar("T")

MAX_DIGITS, MAX_SHOWN = 20, 200


def split_endpoint(endpoint: str, *, default_port: T) -> tuple[str, int | T]:
    """The host and port of HOST, HOST:PORT, [IPV6]:PORT or (as in torchrun) IPV6:PORT; the host defaults to localhost.

    Raises: UsageError for an invalid port. Source: torch elastic, parse_rendezvous_endpoint.
    """
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]") or _is_bare_ipv6(text):
        return text.strip("[]") or "localhost", default_port
    if not (port.isascii() and port.isdigit() and len(port) <= MAX_DIGITS) or int(port) > 65535:
        raise UsageError(
            f"invalid port {quoted(port)} in rendezvous endpoint {text[:MAX_SHOWN]}",
            hint="HOST:PORT with a port from 0 to 65535",
        )
    return host.strip("[]") or "localhost", int(port)


def with_brackets(endpoint: str) -> str:
    """The endpoint with brackets around a bare IPv6 address, whose last group torch would take for a port."""
    return f"[{endpoint.strip()}]" if _is_bare_ipv6(endpoint.strip()) else endpoint


def _is_bare_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address without brackets and port (a last group of five digits is a port)."""
    return text.count(":") > 1 and not text.startswith("[") and len(text.rpartition(":")[2]) < 5


def is_file_store(conf: Mapping[str, str]) -> bool:
    """Whether these settings of a c10d rendezvous make its endpoint the path of a file.

    Source: torch elastic, c10d_rendezvous_backend, create_backend.
    """
    return conf.get("store_type", "").strip().lower() == "file"


def rendezvous_address(endpoint: str, *, backend: str, conf: Mapping[str, str]) -> str:
    """The endpoint of a rendezvous; "" if it has none, or the path of a file in its place."""
    return "" if backend == "c10d" and is_file_store(conf) else endpoint


def is_loopback_name(host: str) -> bool:
    """Whether the name always means the machine on which it is resolved."""
    return host == "localhost" or host == "::1" or host.startswith("127.")
