"""A client of a store on loopback connects to a server of this user or root only."""

import contextlib
import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from cpulaunch.system import loopback_store
from cpulaunch.system.loopback_store import StrangerError, connected, loopback_listener, on_loopback
from cpulaunch.system.tcp import connections, owners
from cpulaunch.system.tcp.owners import owner_of_server
from tests.strangers import UID, needs_root

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose sockets are at a port")
SOON = timedelta(seconds=0.1)
LISTENER = """
import os, socket, sys
if sys.argv[2] == "stranger":
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[3])])
    os.setresuid(*3 * [int(sys.argv[3])])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((sys.argv[4], int(sys.argv[1])))
server.listen()
print(server.getsockname()[1], flush=True)
client = server.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listen():
    """A function that starts a process of this user or a stranger, which listens: it, and its port."""
    with contextlib.ExitStack() as ended:

        def start(user, port=0, address="127.0.0.1"):
            command = [sys.executable, "-c", LISTENER, str(port), user, str(UID), address]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ended.enter_context(process)
            ended.callback(process.kill)
            return process, int(process.stdout.readline())

        yield start


def connection(host, port, *arguments, **options):
    """A store that has connected."""
    return socket.create_connection((host, port))


def never(host, port, *arguments, **options):
    raise AssertionError("connected")


def accepted_by(server, accepted):
    """A function that makes a store whose connection the server, a socket of this process, has accepted."""

    def make_store(host, port, *arguments, **options):
        made = connection(host, port)
        accepted.append(server.accept()[0])
        return made

    return make_store


@pytest.fixture
def accepted():
    """A list of sockets, which are closed at the end."""
    sockets = []
    yield sockets
    for each in sockets:
        each.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_client_connects_to_a_server_of_its_own_user(listen, address):
    _, port = listen("own", address=address)
    on_loopback(connection)("127.0.0.1", port).close()


@pytest.mark.parametrize("timeout", [60.0, timedelta(seconds=60)])
def test_a_timeout_may_be_seconds(listen, timeout):
    _, port = listen("own")
    on_loopback(connection)("127.0.0.1", port, 2, False, timeout).close()


@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize("wrong", [{"port": 70000}, {"port": -1}, {"port": "1234"}, {"timeout": 5}, {"timeout": None}])
def test_torch_says_what_is_wrong_with_a_port_or_timeout(serves, wrong):
    calls = []
    on_loopback(lambda *arguments, **options: calls.append((*arguments, options)))(
        "localhost", is_master=serves, **{"port": 0} | wrong
    )
    [(host, port, options)] = calls
    assert (host, {"port": port} | options) == ("localhost", {"port": 0, "is_master": serves} | wrong)


@needs_root
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_client_does_not_connect_to_a_strangers_server(listen, address):
    _, port = listen("stranger", address=address)
    with pytest.raises(RuntimeError, match=f"127.0.0.1, {port}.*Another user listened there, with uid {UID}"):
        on_loopback(never)("127.0.0.1", port, 2, False, SOON)


@needs_root
def test_a_client_that_waits_says_once_who_listens(listen, monkeypatch, capfd):
    _, port = listen("stranger")
    monkeypatch.setattr(loopback_store, "SILENT_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="timed out"):
        on_loopback(never)("127.0.0.1", port, timeout=SOON)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"cpulaunch: warning: uid {UID} listens at 127.0.0.1, port {port}; waiting for rank 0")


def test_the_error_names_a_stranger_who_has_gone_again(monkeypatch):
    users = iter([os.geteuid(), UID])  # Of the socket that is asked for first, and of a server.
    monkeypatch.setattr(loopback_store, "owner_of_server", lambda *arguments: next(users, None))
    with pytest.raises(RuntimeError, match=f"timed out.*with uid {UID}"):
        on_loopback(never)("127.0.0.1", 1, timeout=SOON)


def test_a_client_asks_less_often_the_longer_it_waits(monkeypatch):
    pauses = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(loopback_store, "time", clock)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="timed out"):
            on_loopback(never)("127.0.0.1", bound.getsockname()[1], timeout=timedelta(seconds=9))
    assert (pauses[1], pauses[-1]) == (0.005, 0.05)
    assert all(later >= earlier for earlier, later in itertools.pairwise(pauses))


@needs_root
def test_a_client_waits_until_the_stranger_has_gone_and_rank_0_listens(listen, accepted):
    stranger, port = listen("stranger")
    listeners = []

    def replace():
        stranger.kill()
        stranger.wait()
        listeners.append(loopback_listener("127.0.0.1", port))

    later = threading.Timer(0.1, replace)
    later.start()
    make_store = on_loopback(lambda *arguments, **options: accepted_by(listeners[0], accepted)(*arguments))
    with make_store("127.0.0.1", port) as store:
        assert accepted[0].getpeername() == store.getsockname()
    later.join()
    listeners[0].close()


@needs_root
@pytest.mark.parametrize("prefix", ["", "::ffff:"])
def test_a_client_drops_a_server_that_a_stranger_has_replaced_when_it_connected(listen, prefix):
    own = loopback_listener("127.0.0.1", 0)
    port = own.getsockname()[1]

    def make_store(host, port, **options):
        own.close()
        stranger, _ = listen("stranger", port)
        made = connection(f"{prefix}{host}", port)
        assert stranger.stdout.readline() == b"accepted\n"
        stranger.kill()  # A closed connection has no owner: what the stranger sent can still be read.
        return made

    with pytest.raises(RuntimeError, match=f"uid {UID} has accepted|port {port}, has gone"):
        on_loopback(make_store)("127.0.0.1", port, timeout=SOON)


def test_a_server_may_accept_later_than_its_client_connects():
    with loopback_listener("127.0.0.1", 0) as own:
        accepts = threading.Timer(0.1, lambda: accepted.append(own.accept()))
        accepted = []
        accepts.start()
        with on_loopback(connection)("127.0.0.1", own.getsockname()[1], timeout=timedelta(seconds=60)) as store:
            assert accepted[0][1] == store.getsockname()
        accepts.join()
        accepted[0][0].close()


def test_a_client_does_not_wait_for_a_server_that_has_closed_the_connection(monkeypatch):
    def make_store(host, port, **options):
        made = socket.create_connection((host, port))
        own.accept()[0].close()
        assert made.recv(1) == b""
        return made

    monkeypatch.setattr(loopback_store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=never))
    with loopback_listener("127.0.0.1", 0) as own, pytest.raises(RuntimeError, match="has gone or"):
        on_loopback(make_store)("127.0.0.1", own.getsockname()[1])


def test_a_client_whose_connection_is_not_found_is_dropped():
    with loopback_listener("127.0.0.1", 0) as own, pytest.raises(RuntimeError, match="has gone or"):
        on_loopback(lambda *arguments, **options: "store")("127.0.0.1", own.getsockname()[1])


def test_only_connections_of_tcp_are_looked_at(accepted):
    with loopback_listener("127.0.0.1", 0) as own, socket.socket(type=socket.SOCK_DGRAM) as datagrams:

        def make_store(host, port, **options):
            datagrams.connect((host, port))
            return accepted_by(own, accepted)(host, port)

        on_loopback(make_store)("127.0.0.1", own.getsockname()[1], timeout=SOON).close()


def test_a_socket_that_cannot_be_looked_at_leaves_no_descriptor(tmp_path):
    with (tmp_path / "file").open("w") as file:
        before = os.listdir("/dev/fd")
        with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)):
            connections.socket_of(file.fileno())
        assert os.listdir("/dev/fd") == before


def test_sockets_of_the_process_still_block_after_they_were_looked_at(accepted):
    with loopback_listener("127.0.0.1", 0) as own, socket.create_connection(own.getsockname()) as client:
        own.accept()[0].close()
        socket.setdefaulttimeout(60)
        try:
            on_loopback(accepted_by(own, accepted))("127.0.0.1", own.getsockname()[1]).close()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(client.fileno())
        assert os.get_blocking(own.fileno())


def test_without_an_answer_of_the_kernel_a_client_connects_at_once(monkeypatch):
    monkeypatch.setattr(owners, "NETLINK_SOCK_DIAG", 31)
    assert on_loopback(lambda *arguments, **options: "store")("127.0.0.1", 1) == "store"


def no_port(*arguments):
    raise OSError(errno.EADDRINUSE, "Address already in use")


@needs_root
def test_a_stranger_who_holds_all_ports_is_not_trusted(listen, monkeypatch):
    _, port = listen("stranger")
    monkeypatch.setattr(loopback_store, "loopback_listener", no_port)
    with pytest.raises(RuntimeError, match=f"Another user listened there, with uid {UID}"):
        on_loopback(never)("127.0.0.1", port, timeout=SOON)


def test_where_all_ports_are_held_a_client_connects_to_its_own_user(listen, monkeypatch):
    _, port = listen("own")
    monkeypatch.setattr(loopback_store, "loopback_listener", no_port)
    on_loopback(connection)("127.0.0.1", port).close()


@pytest.mark.parametrize("number", [errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.ENOBUFS])
def test_a_kernel_that_cannot_answer_now_is_none_that_never_tells(monkeypatch, number):
    make_socket = socket.socket

    def failing(family=-1, *arguments, **options):
        if family == socket.AF_NETLINK:
            raise OSError(number, os.strerror(number))
        return make_socket(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        on_loopback(never)("127.0.0.1", 1, timeout=SOON)


def test_an_error_that_the_kernel_answers_is_raised():
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        owners._raise_error_of(struct.pack("=IHHIIi", 36, 2, 0, 0, 0, -errno.EINVAL) + bytes(16))


@needs_root
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_stranger_who_listens_is_an_error_at_once_for_an_impatient_client(listen, address):
    _, port = listen("stranger", address=address)
    with pytest.raises(StrangerError, match=f"uid {UID} listens at 127.0.0.1, port {port}") as error:
        connected(never, [("127.0.0.1", port)], 60, patient=False)
    assert error.value.user == UID


@needs_root
def test_a_client_takes_that_of_several_addresses_where_its_own_user_listens(listen):
    _, port = listen("own", address="127.0.0.1")
    listen("stranger", port, "127.0.0.2")
    servers = [("127.0.0.2", port), ("127.0.0.1", port)]
    with connected(lambda address: connection(address, port), servers, 60, patient=False) as store:
        assert store.getpeername() == ("127.0.0.1", port)


@needs_root
def test_listeners_are_chosen_as_the_kernel_does(listen):
    """A stranger's listener at another address of the port is none at 127.0.0.1."""
    with loopback_listener("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        listen("stranger", port, "127.0.0.2")
        assert owner_of_server(("127.0.0.1", port)) == os.geteuid()
        assert owner_of_server(("127.0.0.2", port)) == UID
        assert owner_of_server(("::1", port)) is None


@pytest.mark.torch
def test_without_a_server_the_error_is_torchs_own():
    dist = pytest.importorskip("torch.distributed")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        texts = []
        for make_store in (dist.TCPStore, on_loopback(dist.TCPStore)):
            with pytest.raises(dist.DistNetworkError) as caught:
                make_store("127.0.0.1", port, 2, False, SOON)
            texts.append(str(caught.value).splitlines()[0])
    assert texts[0] == texts[1]


def test_the_timeout_is_not_exceeded_where_several_addresses_do_not_answer(monkeypatch):
    """As behind a firewall that drops packets. 127.0.0.1 stands for this host, the others for other hosts."""
    now, tried = [0.0], []

    def create_connection(server, timeout):
        tried.append(server[0])
        now[0] += timeout
        raise TimeoutError

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(loopback_store, "time", clock)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        here, *others = [(f"127.0.0.{last}", bound.getsockname()[1]) for last in range(1, 6)]
        with pytest.raises(RuntimeError, match="timed out"):
            connected(never, [here], 20, patient=False, others=others)
    assert set(tried) == {server[0] for server in (here, *others)}
    assert 20 <= now[0] < 20.1
