"""The port of a job: nobody else gets it by chance, and who takes it all the same is noticed."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap

import pytest
from jobs import HERE

from cpulaunch.launch.ranks.port import Reservation, check_address, holder_of
from cpulaunch.records.errors import LaunchError

ROOT = HERE.parents[2]


@contextlib.contextmanager
def listening(port, *, host="", reuse=True):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        server.bind((host, port))
        server.listen()
        yield server


def test_a_held_port_is_free_for_a_server_that_knows_it():
    with Reservation(None) as held:
        for host in ("", "127.0.0.1"):
            with listening(held.port, host=host):
                assert held.port
        assert not held.is_taken()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_who_listens_on_a_held_port_is_noticed(host):
    with Reservation(None) as held:
        with listening(held.port, host=host):
            assert held.is_taken()
            assert holder_of(held.port).pid == os.getpid()
        assert not held.is_taken()
        assert holder_of(held.port) is None or holder_of(held.port).pid == os.getpid()


def test_nobody_who_does_not_know_it_takes_a_held_port():
    with Reservation(None) as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.port))


def test_connections_to_a_held_port_are_refused_until_somebody_listens():
    with Reservation(None) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=30)


@pytest.mark.torch
@pytest.mark.parametrize("libuv", [True, False])
def test_torchs_store_listens_on_a_held_port(libuv):
    from torch.distributed import TCPStore

    with Reservation(None) as held:
        store = TCPStore("localhost", held.port, 1, is_master=True, use_libuv=libuv)
        assert store.port == held.port
        assert held.is_taken()
        del store
        assert not held.is_taken()


def test_a_port_that_is_taken_names_who_has_it():
    with listening(0) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError) as raised:
            Reservation(port)
    assert f": {port} (--master-port)" in str(raised.value)
    assert f"(pid {os.getpid()})" in str(raised.value)
    assert raised.value.exit_code == 125


def test_a_port_that_was_in_use_a_moment_ago_is_no_obstacle():
    with Reservation(None) as held:
        port = held.port
        with listening(port) as server, socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # Who closes first keeps the port in TIME_WAIT.
            assert client.recv(1) == b""
    with Reservation(port) as again:
        assert again.port == port


def test_a_name_that_does_not_resolve_is_an_error():
    with pytest.raises(LaunchError, match="does not resolve"):
        check_address("no-such-host.invalid")
    for address in ("localhost", "127.0.0.1", "::1", "127.0.0.2"):
        check_address(address)


NARROW = """
    import socket, sys
    sys.path.insert(0, sys.argv[1])
    from cpulaunch.launch.ranks.port import Reservation

    # Four ports are all there is for whoever asks for any: two held here, two left.
    held = [Reservation(None) for _ in range(2)]
    ports = {each.port for each in held}
    others = []
    try:
        while True:
            others.append(socket.socket())
            others[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            others[-1].bind(("127.0.0.1", 0))
    except OSError:
        others.pop().close()
    got = {each.getsockname()[1] for each in others}
    assert len(ports) == 2 and not got & ports, (ports, got)
    for each in others:
        each.close()

    # Nor does a connection leave from one: it would meet itself.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 9))
        server.listen()
        clients = []
        try:
            while True:
                clients.append(socket.create_connection(("127.0.0.1", 9)))
        except OSError:
            pass
        got = {each.getsockname()[1] for each in clients}
        assert got and not got & ports, (ports, got)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace with few ports needs root")
def test_the_kernel_gives_a_held_port_to_nobody():
    code = f"echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range; ip link set lo up; exec {sys.executable} - $0"
    namespace = ["unshare", "--net", "sh", "-c", code, str(ROOT)]
    done = subprocess.run(
        namespace, input=textwrap.dedent(NARROW), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
