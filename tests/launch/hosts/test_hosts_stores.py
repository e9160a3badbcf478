"""The stores of torch's agent use no server of another user on this host: torch runs code that a store has."""

import ipaddress
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cpulaunch.launch.hosts.agent import reachability, stores
from cpulaunch.launch.hosts.agent.reachability import is_this_host, own_and_other_addresses
from cpulaunch.launch.hosts.agent.stores import of_no_stranger
from cpulaunch.records.errors import LaunchError
from cpulaunch.system import loopback_store
from cpulaunch.system.loopback_store import loopback_listener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose sockets are at a port")
STRANGER, SOON, LATER = 12345, timedelta(seconds=0.1), timedelta(seconds=60)
BOTH = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
OUTSIDE = (socket.AF_INET, "192.0.2.1")
"""No host has it. Source: RFC 5737."""


def never(host, port, **options):
    raise AssertionError("connected")


def with_owners(monkeypatch, port, listeners, connection=None):
    """Effect: these users listen at the port, one after the other, and this one has the connection."""
    users = iter(listeners)

    def owner(server, client=None):
        if server[1] != port:  # The socket by which the kernel tells this user's number.
            return os.geteuid()
        return connection if client else next(users)

    monkeypatch.setattr(loopback_store, "owner_of_server", owner)


@pytest.mark.parametrize("before", [[], [None, None]], ids=["first", "while it waits"])
def test_a_stranger_who_listens_is_an_error_at_once(monkeypatch, before):
    with_owners(monkeypatch, 1, [*before, STRANGER])
    with pytest.raises(LaunchError, match=f"another user listens .*: 127.0.0.1:1 .*uid {STRANGER}"):
        of_no_stranger(never)("127.0.0.1", 1, is_master=False, timeout=LATER)


@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize("stranger", [False, True])
def test_a_connection_that_a_stranger_has_accepted_is_not_used(monkeypatch, serves, stranger):
    with loopback_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with_owners(monkeypatch, port, [os.geteuid()], STRANGER if stranger else os.geteuid())
        make_store = of_no_stranger(lambda host, port, **options: socket.create_connection((host, port)))
        if stranger:
            with pytest.raises(LaunchError, match=f"another user listens .*: 127.0.0.1:{port} .*uid {STRANGER}"):
                make_store("127.0.0.1", port, is_master=serves, timeout=LATER)
        else:
            make_store("127.0.0.1", port, is_master=serves, timeout=LATER).close()


@pytest.mark.parametrize("serves", [False, True])
def test_of_several_addresses_that_is_used_where_a_server_of_this_user_listens(monkeypatch, serves):
    """torch's server listens for IPv4 alone where a stranger's is at ::1, which its client would try first."""
    monkeypatch.setattr(reachability, "addresses", lambda host: [OUTSIDE, *BOTH])
    reached = []

    def make_store(host, port, **options):
        reached.append((host, options["is_master"], options["multi_tenant"]))
        return socket.create_connection((host, port))

    with loopback_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with_owners(monkeypatch, port, [os.geteuid(), None], os.geteuid())
        of_no_stranger(make_store)("name", port, is_master=serves, timeout=LATER, multi_tenant=True).close()
    assert reached == [("127.0.0.1", serves, True)]


@pytest.mark.parametrize("listener", [None, STRANGER], ids=["none", "stranger"])
def test_where_nobody_listens_here_the_other_addresses_of_the_name_are_tried(monkeypatch, listener):
    """Never the name itself, whose own address a stranger may take meanwhile. 127.0.0.2 stands for another host's.

    A stranger who listens at all addresses of this host is shown by the kernel for any other host's too.
    """
    monkeypatch.setattr(reachability, "addresses", lambda host: [(socket.AF_INET, f"127.0.0.{n}") for n in (2, 1)])
    monkeypatch.setattr(reachability, "_is_own", lambda family, address: address == "127.0.0.1")
    with loopback_listener("127.0.0.2", 0) as server:
        port = server.getsockname()[1]
        users = {("127.0.0.1", port): None, ("127.0.0.2", port): listener}
        monkeypatch.setattr(loopback_store, "owner_of_server", lambda *asked: users.get(asked[0], os.geteuid()))
        make_store = of_no_stranger(lambda host, port, **options: socket.create_connection((host, port)))
        with make_store("name", port, is_master=False, timeout=LATER) as store:
            assert store.getpeername() == server.getsockname()


@pytest.mark.parametrize("case", ["elsewhere", "any port", "a kernel that does not tell"])
def test_torch_makes_other_stores_as_ever(monkeypatch, case):
    host, port = "name", 0 if case == "any port" else 1
    found = [OUTSIDE] if case == "elsewhere" else BOTH
    monkeypatch.setattr(reachability, "addresses", lambda name: found)
    if case == "a kernel that does not tell":
        monkeypatch.setattr(stores, "trusted_users", lambda address: frozenset())
    make_store = of_no_stranger(lambda *arguments, **options: (*arguments, options))
    options = {"is_master": port == 0, "timeout": LATER}
    assert make_store(host, port, **options) == (host, port, options)


def failing(number, times, found):
    """A function in place of `addresses`, that fails so many times and then has found these."""
    errors = [socket.gaierror(number, "no answer now")] * times

    def addresses(host):
        if errors:
            raise errors.pop()
        return found

    return addresses


def test_a_name_service_that_fails_for_a_moment_lets_no_store_connect_unchecked(monkeypatch):
    monkeypatch.setattr(reachability, "RETRY_SECONDS", 0)
    monkeypatch.setattr(reachability, "addresses", failing(socket.EAI_AGAIN, 2, BOTH))
    with_owners(monkeypatch, 1, [STRANGER, STRANGER])
    with pytest.raises(LaunchError, match="another user listens"):
        of_no_stranger(never)("name", 1, is_master=False, timeout=LATER)


@pytest.mark.parametrize(
    ("number", "timeout"), [(socket.EAI_NONAME, LATER), (socket.EAI_AGAIN, timedelta())], ids=["no name", "no service"]
)
def test_a_name_that_does_not_resolve_is_told_and_not_connected_to(monkeypatch, number, timeout):
    monkeypatch.setattr(reachability, "addresses", failing(number, 1000, BOTH))
    with pytest.raises(LaunchError, match=r"cannot be reached: name:1 .the name does not resolve"):
        of_no_stranger(never)("name", 1, is_master=False, timeout=timeout)


def test_an_address_is_none_of_another_host_because_the_kernel_cannot_tell_now(monkeypatch):
    """As other users may take all ports of UDP: the route is asked for by a socket that needs one."""

    class Socket(socket.socket):
        def connect(self, address):
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(LaunchError, match=r"cannot be reached: 192\.0\.2\.1:1"):
        of_no_stranger(never)("192.0.2.1", 1, is_master=False, timeout=SOON)
    assert not is_this_host("192.0.2.1")


@pytest.mark.parametrize(("host", "own"), [("0.0.0.0", ["127.0.0.1"]), ("::", ["::1"]), ("127.0.0.3", ["127.0.0.3"])])
def test_connections_to_any_address_stay_on_this_host(host, own):
    assert own_and_other_addresses(host, timeout_seconds=0) == (own, [])


@pytest.mark.torch
def test_the_store_that_torchs_rendezvous_makes_itself_is_checked(monkeypatch):
    from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend

    monkeypatch.setattr(c10d_rendezvous_backend, "TCPStore", never)
    stores.check_servers_of_c10d()
    with_owners(monkeypatch, 29400, [None, STRANGER])
    conf = {"is_host": False, "read_timeout": 60}
    parameters = RendezvousParameters("c10d", "127.0.0.1:29400", "id", 1, 1, **conf)
    with pytest.raises(LaunchError, match="another user listens"):
        c10d_rendezvous_backend.create_backend(parameters)


def test_a_server_at_an_address_of_one_link_is_found_by_its_interface():
    listed = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    links = [(words[0], words[5]) for words in listed if words[0].startswith("fe80")]
    if not links:
        pytest.skip("no address of IPv6 for one link alone")
    address, name = ipaddress.IPv6Address(int(links[0][0], 16)), links[0][1]
    [own], _ = own_and_other_addresses(f"{address}%{name}", timeout_seconds=0)
    assert own == f"{address}%{socket.if_nametoindex(name)}"
    accepted = []

    def make_store(host, port, **options):
        made = socket.create_connection((host, port))
        accepted.append(listener.accept()[0])
        return made

    with socket.create_server(("::", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        of_no_stranger(make_store)(f"{address}%{name}", port, is_master=False, timeout=LATER).close()
    accepted[0].close()
