"""A stranger's end of a connection is found however it hides; a server that this host does not show is not used."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cpulaunch.system import loopback_store
from cpulaunch.system.loopback_store import StrangerError, connected, loopback_listener
from cpulaunch.system.tcp import owners
from cpulaunch.system.tcp.owners import ESTABLISHED, LISTEN, ends_of_connection, owner_of_server
from tests.strangers import UID, needs_root

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose sockets are at a port")
SO_BINDTOIFINDEX, NO_DEVICE, IPV6_ADDRFORM = 62, 99999, 1
"""Source: linux/socket.h, linux/in6.h. No device has that number."""
Found = tuple[int, int, int]
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
from cpulaunch.system.loopback_store import StrangerError, connected
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
try:
    connected(lambda at: sys.exit("connected"), [place], 60, patient=False)
except StrangerError as error:
    print(error, end="")
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
        assert owner_of_server(place, own) is None


def hide(monkeypatch: pytest.MonkeyPatch, port: int, found: Found | None = None) -> None:
    """Effect: the kernel shows this socket alone, or none, of a server at this port."""
    socket_at, listed = owners.socket_at, owners._listed_ends
    monkeypatch.setattr(owners, "socket_at", lambda *asked: found if asked[0][1] == port else socket_at(*asked))
    monkeypatch.setattr(owners, "_listed_ends", lambda *asked: [] if asked[0][1] == port else listed(*asked))


@pytest.mark.parametrize("listener", [None, (LISTEN, os.geteuid(), 1)], ids=["no", "own"])
@pytest.mark.parametrize("patient", [False, True])
def test_a_server_that_this_host_does_not_show_is_not_used(
    monkeypatch: pytest.MonkeyPatch, listener: Found | None, patient: bool
) -> None:
    """It may be a stranger's, closed in secret, who makes another end of the connection by SYN cookies later."""
    with loopback_listener("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        hide(monkeypatch, port, listener)
        with pytest.raises(StrangerError, match="has gone or is not one of this user; if the port is forwarded, name"):
            connected(
                lambda address: socket.create_connection((address, port)),
                [("127.0.0.1", port)],
                0.1,
                serves=True,
                patient=patient,
            )


def test_a_client_waits_no_minute_for_a_server_that_this_host_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_store, "SILENT_SECONDS", 0.0)
    with loopback_listener("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        hide(monkeypatch, port)
        hidden = f"what accepts connections at 127.0.0.1, port {port}, is hidden; if the port is forwarded, name the"
        with pytest.raises(StrangerError, match=hidden):
            connected(lambda address: pytest.fail("connected"), [("127.0.0.1", port)], 1e9, patient=False)


def test_a_server_that_has_just_been_started_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens after its owner was asked for, and accepts the connection by which the client looks."""
    monkeypatch.setattr(loopback_store, "SILENT_SECONDS", 0.0)
    with loopback_listener("127.0.0.1", 0) as server:
        place, shown = server.getsockname(), owners.socket_at
        hidden_once = [place]

        def socket_at(asked: tuple[str, int], *client: tuple[str, int]) -> Found | None:
            return None if asked in hidden_once and not client and hidden_once.pop() else shown(asked, *client)

        def connect(address: str) -> socket.socket:
            made = socket.create_connection(place)
            while (accepted := server.accept())[1] != made.getsockname():
                accepted[0].close()
            ended.callback(accepted[0].close)
            return made

        monkeypatch.setattr(owners, "socket_at", socket_at)
        with contextlib.ExitStack() as ended, connected(connect, [place], 60, patient=False) as store:
            assert store.getpeername() == place
        assert not hidden_once


@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("nft")), reason="needs unshare and nft")
def test_a_port_that_a_rule_of_nftables_forwards_is_an_error_that_tells_what_to_do() -> None:
    ended = subprocess.run(["unshare", "-rn", sys.executable, "-c", FORWARDED], capture_output=True, check=False)
    if ended.returncode == 77 or ended.stderr.startswith(b"unshare:"):
        pytest.skip("this user may make no network namespace, or no rules in it")
    told = b"what accepts connections at 127.0.0.1, port 29400, is hidden; if the port is forwarded, name the address"
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(told)


def test_without_a_list_of_sockets_there_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "INET_DIAG_BC_S_COND", 99)  # An error of the kernel: there is no such condition.
    assert owners._listed_ends(("127.0.0.1", 1), ("127.0.0.1", 2)) == [owners.UNKNOWN]
    assert owner_of_server(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
