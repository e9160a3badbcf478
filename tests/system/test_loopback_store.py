"""Which names and stores are restricted to loopback, without torch."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import pytest

from cpulaunch.system.loopback_store import loopback_address, loopback_listener, on_loopback


def recorded(calls, *, accepts=True):
    def make_store(host_name, port, world_size=None, is_master=False, timeout=None, **options):
        if "master_listen_fd" in options and not accepts:
            raise TypeError("incompatible constructor arguments")
        calls.append((host_name, port, is_master, options))
        return "store"

    return make_store


def test_an_address_of_ipv4_may_be_written_as_one_of_ipv6():
    assert loopback_address("::ffff:127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.5"])
def test_a_store_at_a_loopback_name_is_given_a_socket_there(name):
    calls = []
    assert on_loopback(recorded(calls))(name, 0, 2, True) == "store"
    [(host, port, is_master, options)] = calls
    assert (host, is_master) == (name.replace("localhost", "127.0.0.1"), True)
    with socket.socket(fileno=options["master_listen_fd"]) as listener:
        assert listener.getsockname()[0].startswith("127.")
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("0.0.0.0", {"is_master": True}),
        ("192.0.2.1", {"is_master": True}),
        ("no such name", {"is_master": True}),
        ("192.0.2.1", {"is_master": False}),
        ("192.0.2.1", {}),
    ],
)
def test_other_stores_are_left_alone(name, options):
    calls = []
    on_loopback(recorded(calls))(host_name=name, port=1234, **options)
    assert calls == [(name, 1234, options.get("is_master", False), {})]


@pytest.mark.parametrize("options", [{"is_master": False}, {}])
def test_a_client_connects_to_the_address_at_which_the_store_listens(monkeypatch, options):
    both = [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: both)
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def make_store(host, port, **options):
            calls.append((host, port, options))
            client.connect((host, port))
            accepted.append(server.accept()[0])

        accepted = []
        with socket.socket() as client:
            on_loopback(make_store)("localhost", port, **options)
        accepted[0].close()
    assert calls == [("127.0.0.1", port, options)]


def test_a_port_that_this_process_serves_is_left_to_torch_which_shares_the_store():
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        on_loopback(recorded(calls))("127.0.0.1", port, 1, True)
    assert calls == [("127.0.0.1", port, True, {})]


LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def neighbour():
    """A function that starts a process which listens for so many seconds; its port."""
    with contextlib.ExitStack() as ended:

        def listen(seconds):
            program = [sys.executable, "-c", LISTENER, str(seconds)]
            process = ended.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE))
            ended.callback(process.kill)
            return int(process.stdout.readline())

        yield listen


def test_a_port_that_another_process_serves_is_an_error_and_never_torchs_own_store(neighbour):
    """That store would listen on all addresses once the other process has let go."""
    calls, port = [], neighbour(60)
    with pytest.raises(RuntimeError, match=f"127.0.0.1, port {port}: Address already in use"):
        on_loopback(recorded(calls))("127.0.0.1", port, 1, True)
    assert calls == []


def test_a_port_that_another_process_serves_for_a_moment_is_tried_again(neighbour):
    class Store:
        def __init__(self, host, port, size, is_master, **options):
            self.port, self.descriptor = port, options["master_listen_fd"]

    port = neighbour(0.1)
    store = on_loopback(Store)("127.0.0.1", port, 1, True)
    assert store.port == port
    os.close(store.descriptor)
    seen = weakref.ref(store)
    del store
    deadline = time.monotonic() + 1
    while seen() is not None and time.monotonic() < deadline:  # Another thread may look at this one's frames.
        time.sleep(0.01)
    assert seen() is None, "what was tried before keeps it, and its server, alive"


@pytest.mark.parametrize("version", ["2.13.0", "2.0.1"])
def test_a_torch_that_takes_no_socket(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    calls = []
    on_loopback(recorded(calls, accepts=False))("127.0.0.1", 1234, 1, True)
    assert calls == [("127.0.0.1", 1234, True, {})]


@pytest.mark.parametrize(("version", "changes"), [("2.7.1+cpu", {"use_libuv": False}), ("2.8.0", {}), ("odd", {})])
def test_a_torch_whose_store_with_libuv_takes_no_socket(monkeypatch, version, changes):
    """torch 2.4 to 2.7: no job of one host could start."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    calls = []
    on_loopback(recorded(calls))("127.0.0.1", 0, is_master=True, use_libuv=True)
    [(_, _, _, options)] = calls
    socket.socket(fileno=options.pop("master_listen_fd")).close()
    assert options == {"use_libuv": True} | changes


def test_a_failing_store_keeps_the_descriptor():
    def fails(*arguments, **options):
        raise RuntimeError(options["master_listen_fd"])

    with pytest.raises(RuntimeError) as caught:
        on_loopback(fails)("127.0.0.1", 0, 1, True)
    socket.socket(fileno=caught.value.args[0]).close()


def test_the_reservation_of_the_port_does_not_keep_it_from_the_store():
    from cpulaunch.launch.ranks.port import PortReservation

    with PortReservation(None) as reservation:
        listener = loopback_listener("127.0.0.1", reservation.port)
        assert reservation.is_taken()
        listener.close()
