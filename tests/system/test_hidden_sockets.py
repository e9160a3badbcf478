"""A stranger's end of a connection is found however it hides; without one here, only what root forwards is trusted."""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cpulaunch.system import loopback_store
from cpulaunch.system.loopback_store import StrangerError, connected, loopback_listener
from cpulaunch.system.tcp import owners
from cpulaunch.system.tcp.connections import is_acknowledged, is_idle
from cpulaunch.system.tcp.owners import ESTABLISHED, LISTEN, ends_of_connection, owner_of_server
from tests.strangers import UID, needs_root

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose sockets are at a port")
SO_BINDTOIFINDEX, NO_DEVICE, IPV6_ADDRFORM, IP_MINTTL = 62, 99999, 1, 21
"""Source: linux/socket.h, linux/in6.h, linux/in.h. No device has that number."""
Found = tuple[int, int, int]
TRUSTED = frozenset({0, os.geteuid()})
HIDING = """
import os, socket, sys
os.setgroups([])
os.setresgid(*3 * [int(sys.argv[1])])
os.setresuid(*3 * [int(sys.argv[1])])
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
client = server.accept()[0]
try:
    client.setsockopt(socket.SOL_SOCKET, 62, 99999)
except OSError:
    print("no", flush=True)
server.close()
print("hidden", flush=True)
sys.stdin.read()
"""
FORWARDED = """
import socket, subprocess, sys
from cpulaunch.system.loopback_store import connected
rules = '''
table ip nat {
  chain output {
    type nat hook output priority -100;
    tcp dport 29400 redirect to :40001
  }
}
'''
set_up = "ip link set lo up && nft -f -"
if subprocess.run(["sh", "-c", set_up], input=rules.encode(), check=False).returncode:
    sys.exit(77)
server = socket.create_server(("127.0.0.1", 40001))
place = ("127.0.0.1", 29400)
store = connected(lambda at: socket.create_connection(place), [place], 60, patient=False)
server.settimeout(60)
while server.accept()[1] != store.getsockname():  # The connections that were made before it.
    pass
"""


@pytest.fixture
def hiding() -> Iterator[Callable[[], tuple[int, Callable[[], str]]]]:
    """A function that starts a stranger who hides what it accepts: its port, and a function that waits until then."""
    with contextlib.ExitStack() as ended:

        def start() -> tuple[int, Callable[[], str]]:
            command = [sys.executable, "-c", HIDING, str(UID)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ended.enter_context(process)
            ended.callback(process.kill)
            assert process.stdout is not None
            return int(process.stdout.readline()), process.stdout.readline

        yield start


@needs_root
@pytest.mark.parametrize("patient", [False, True])
def test_a_stranger_who_hides_the_accepted_connection_is_named(
    hiding: Callable[[], tuple[int, Callable[[], str]]], patient: bool
) -> None:
    port, said = hiding()

    def connect(address: str) -> socket.socket:
        made = socket.create_connection((address, port))
        if said() == "no\n":
            pytest.skip("this kernel lets root alone bind a socket to a device")
        return made

    with pytest.raises(StrangerError, match=f"uid {UID} has accepted the connection at 127.0.0.1, port {port}"):
        connected(connect, [("127.0.0.1", port)], 60, serves=True, patient=patient)


@contextlib.contextmanager
def hidden_connection(kind: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's and the server's end of a connection, of which the latter is bound to no device that there is."""
    address = {"4": "127.0.0.1", "6": "::1"}.get(kind, "::")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if kind != "4" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    with socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::") as listener:
        target = "::1" if kind == "6" else "127.0.0.1"
        client = socket.create_connection((target, listener.getsockname()[1]))
        server = listener.accept()[0]
    with client, server:
        if kind == "6 to 4":
            server.setsockopt(socket.IPPROTO_IPV6, IPV6_ADDRFORM, socket.AF_INET)
        try:
            server.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, NO_DEVICE)
        except OSError:
            pytest.skip("this kernel lets root alone bind a socket to a device")
        yield client, server


@pytest.mark.parametrize("kind", ["4", "6", "4 by 6", "6 to 4"])
def test_the_end_of_a_connection_is_found_whatever_device_it_is_bound_to(kind: str) -> None:
    with hidden_connection(kind) as (client, server):
        place, own = client.getpeername()[:2], client.getsockname()[:2]
        inode = os.fstat(server.fileno()).st_ino
        assert ends_of_connection(place, own) == [(ESTABLISHED, os.geteuid(), inode)]
        assert owner_of_server(place, own) == os.geteuid()
        assert ends_of_connection(place, (own[0], own[1] ^ 1)) == []
        server.shutdown(socket.SHUT_WR)
        [(state, *_)] = ends_of_connection(place, own)
        assert state != ESTABLISHED
        assert not loopback_store._ends_elsewhere(place, own, TRUSTED)


@pytest.mark.parametrize("listens", [False, True], ids=["no listener", "one that drops packets"])
def test_a_connection_that_was_closed_in_secret_is_no_forwarded_one(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(loopback_store, "ATTEMPT_SECONDS", 1.5)
    with hidden_connection("4") as (client, server), contextlib.ExitStack() as ended:
        place, own = client.getpeername(), client.getsockname()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()  # No device has taken the packet that tells it.
        assert ends_of_connection(place, own) == []
        assert is_idle(place, own)
        if listens:
            dropping = ended.enter_context(loopback_listener(*place))
            dropping.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)
        assert not loopback_store._ends_elsewhere(place, own, TRUSTED)


def test_a_connection_is_not_idle_while_data_is_not_acknowledged() -> None:
    """By the first data, a listener with SYN cookies can make an end of a connection that this host had not."""
    with hidden_connection("4") as (client, server):
        place, own = client.getpeername(), client.getsockname()
        with loopback_listener(*place) as dropping:
            dropping.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)
            assert is_idle(place, own)
            client.sendall(b"data")
            assert not is_idle(place, own)
        assert server.fileno() >= 0


def keepalive(store: socket.socket) -> list[int]:
    """How the socket asks its other end whether it is still there."""
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    asks = store.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [asks, *(store.getsockopt(socket.IPPROTO_TCP, option) for option in options)]


def hide(monkeypatch: pytest.MonkeyPatch, port: int, found: Found | None = None) -> None:
    """Effect: the kernel shows this socket alone, or none, of a server at this port."""
    socket_at, listed = owners.socket_at, owners._listed_ends
    monkeypatch.setattr(owners, "socket_at", lambda *asked: found if asked[0][1] == port else socket_at(*asked))
    monkeypatch.setattr(owners, "_listed_ends", lambda *asked: [] if asked[0][1] == port else listed(*asked))


@pytest.mark.parametrize("listener", [None, (LISTEN, os.geteuid(), 1)], ids=["no", "own"])
def test_a_client_reaches_a_server_behind_a_port_that_root_forwards(
    monkeypatch: pytest.MonkeyPatch, listener: Found | None
) -> None:
    """Such as a container's, published at an address of this host: no socket here has the server's end."""
    with loopback_listener("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        hide(monkeypatch, port, listener)
        before = []

        def connect(address: str) -> socket.socket:
            made = socket.create_connection((address, port))
            before.extend(keepalive(made))
            return made

        with connected(connect, [("127.0.0.1", port)], 60, patient=False) as store:
            assert store.getpeername() == server.getsockname()
            assert keepalive(store) == before


def test_a_rank_takes_no_server_that_this_host_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is on the same host."""
    with loopback_listener("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        hide(monkeypatch, port)
        with pytest.raises(StrangerError, match="has gone or is no longer one of this user"):
            connected(
                lambda address: socket.create_connection((address, port)), [("127.0.0.1", port)], 0.1, serves=True
            )


@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("nft")), reason="needs unshare and nft")
def test_a_client_reaches_a_server_behind_a_rule_of_nftables() -> None:
    ended = subprocess.run(["unshare", "-rn", sys.executable, "-c", FORWARDED], capture_output=True, check=False)
    if ended.returncode == 77 or ended.stderr.startswith(b"unshare:"):
        pytest.skip("this user may make no network namespace, or no rules in it")
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("found", [(LISTEN, UID, 1), (3, 0, 0), (ESTABLISHED, 0, 0), owners.UNKNOWN], ids=str)
def test_a_connection_that_this_host_may_yet_accept_is_none_to_another_host(
    monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    with loopback_listener("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as client:
        place = server.getsockname()
        hide(monkeypatch, place[1], found)
        assert not loopback_store._ends_elsewhere(place, client.getsockname(), TRUSTED)


def test_a_closed_connection_is_none_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_listener("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""
        place = server.getsockname()
        hide(monkeypatch, place[1])
        assert not loopback_store._ends_elsewhere(place, client.getsockname(), TRUSTED)
        assert not is_acknowledged(place, client.getsockname(), 60)


def test_without_a_list_of_sockets_nothing_counts_as_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "INET_DIAG_BC_S_COND", 99)  # An error of the kernel: there is no such condition.
    assert owners._listed_ends(("127.0.0.1", 1), ("127.0.0.1", 2)) == [owners.UNKNOWN]
    assert loopback_store._may_end_here(("127.0.0.1", 1), ("127.0.0.1", 2), TRUSTED)
