"""Which servers the stores of torch's agent use, and where those that it serves listen."""

from __future__ import annotations

from functools import wraps

from cpulaunch.launch.hosts.agent.reachability import own_addresses, reason_of, unreachable_error
from cpulaunch.records.errors import LaunchError
from cpulaunch.system.loopback_store import StrangerError, connected, on_loopback, trusted_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any


def keep_stores_on_loopback() -> None:
    """Effect: the stores that torch's agent serves at a loopback name listen on loopback only.

    Source: torch 2.13: the agent's modules take TCPStore from torch.distributed, the static and the c10d backend when
    they are imported, the dynamic rendezvous when it makes a store for the ranks.
    """
    import torch.distributed
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    for module in (torch.distributed, c10d_rendezvous_backend, static_tcp_rendezvous):
        setattr(module, "TCPStore", on_loopback(module.TCPStore))  # noqa: B010 - mypy: a class may not be assigned to


def check_servers_of_c10d() -> None:
    """Effect: the store of torch's c10d rendezvous uses no server of another user on this host."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as backend

    setattr(backend, "TCPStore", of_no_stranger(backend.TCPStore))  # noqa: B010 - mypy: as above


def of_no_stranger(make_store: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the same TCPStore. Where it connects to this host, then to a server of this user or root.

    torch runs code that the store of a c10d rendezvous has. Even a store that serves may reach another user's server:
    where that one listens at ::1, torch's listens for IPv4 alone, and yet connects by IPv6 first.
    """

    @wraps(make_store, updated=())
    def make(host: str, port: int, *, is_master: bool, timeout: timedelta, **more: Any) -> Any:
        options = more | {"is_master": is_master, "timeout": timeout}
        seconds = timeout.total_seconds()
        try:
            here = [] if is_master and port == 0 else own_addresses(host, timeout_seconds=seconds)
        except (OSError, UnicodeError) as error:
            raise unreachable_error(host, port, reason=reason_of(error)) from None
        if not (here and trusted_users(here[0])):
            return make_store(host, port, **options)
        servers = [(address, port) for address in here]
        try:
            return connected(
                lambda address: make_store(address, port, **options), servers, seconds, serves=is_master, patient=False
            )
        except StrangerError as error:
            raise stranger_error(f"{host}:{port}", error) from None

    return make


def stranger_error(endpoint: str, error: StrangerError) -> LaunchError:
    """The error for an endpoint on this host where another user has the server, or may have had it."""
    gone = "the server at the rendezvous endpoint has gone, or is another user's"
    return LaunchError(
        gone if error.user is None else "another user listens at the rendezvous endpoint",
        value=endpoint,
        source=str(error),
        hint="choose another port, the same on every host: --rdzv-endpoint HOST:PORT",
    )
