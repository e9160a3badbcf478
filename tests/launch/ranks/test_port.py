"""The port of a job: no other process gets it by chance, and a process that takes it is named."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap

import pytest
from jobs import HERE

from cpulaunch.launch.ranks import port as ports
from cpulaunch.launch.ranks.port import PortReservation, check_address, check_port_free, port_holder
from cpulaunch.records.errors import LaunchError

ROOT = HERE.parents[2]


@contextlib.contextmanager
def listening(port, *, host="", reuse=True):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        server.bind((host, port))
        server.listen()
        yield server


def test_a_server_can_listen_on_a_reserved_port_by_number():
    with PortReservation(None) as held:
        for host in ("", "127.0.0.1"):
            with listening(held.port, host=host):
                assert held.port
        assert not held.is_taken()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_listener_on_a_reserved_port_is_noticed(host):
    with PortReservation(None) as held:
        with listening(held.port, host=host):
            assert held.is_taken()
            assert f"(pid {os.getpid()})" in port_holder(held.port)
        assert not held.is_taken()


def test_a_reserved_port_is_refused_without_reuse_of_addresses():
    with PortReservation(None) as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.port))


def test_connections_to_a_reserved_port_are_refused_until_a_server_listens():
    with PortReservation(None) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=30)


@pytest.mark.torch
@pytest.mark.parametrize("libuv", [True, False])
def test_torchs_store_listens_on_a_reserved_port(libuv):
    from torch.distributed import TCPStore

    with PortReservation(None) as held:
        store = TCPStore("localhost", held.port, 1, is_master=True, use_libuv=libuv)
        assert store.port == held.port
        assert held.is_taken()
        del store
        assert not held.is_taken()


@pytest.mark.parametrize("use", [PortReservation, check_port_free])
def test_the_error_for_a_port_in_use_names_its_holder(use):
    with listening(0) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError) as raised:
            use(port)
    assert f": {port} (--master-port)" in str(raised.value)
    assert f"(pid {os.getpid()})" in str(raised.value)
    assert raised.value.exit_code == 125


def test_a_port_in_time_wait_can_be_reserved():
    with PortReservation(None) as held:
        port = held.port
        with listening(port) as server, socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # The side that closes first keeps the port in TIME_WAIT.
            assert client.recv(1) == b""
    with PortReservation(port) as again:
        assert again.port == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil searches")
def test_the_search_for_a_holder_ends_in_time_and_needs_no_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with listening(0, host="127.0.0.1") as server:
        number = server.getsockname()[1]
        monkeypatch.setattr(ports, "SEARCH_SECONDS", 300.0)
        assert f"(pid {os.getpid()})" in port_holder(number)
        monkeypatch.setattr(ports, "SEARCH_SECONDS", -1.0)
        assert port_holder(number) is None


FORKS = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil searches")
def test_the_latest_processes_are_asked_first_and_a_server_is_named_rather_than_what_it_forked(monkeypatch):
    asked = []
    has_one = ports._has_one_of
    monkeypatch.setattr(ports, "SEARCH_SECONDS", 300.0)
    monkeypatch.setattr(ports, "_has_one_of", lambda pid, *rest: asked.append(pid) or has_one(pid, *rest))
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert port_holder(int(process.stdout.readline())).endswith(f"(pid {process.pid})")
        process.stdin.close()
    assert asked[-2:] == [process.pid, os.getpid()]
    assert asked[:-2] == sorted(asked[:-2], reverse=True)


def test_a_port_that_no_process_listens_on_has_no_holder():
    with PortReservation(None) as held:
        assert port_holder(held.port) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's name of a process is Linux's")
@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"A\n\x1b[31mB\xe9", "A\\n\\x1b[31mB\\xe9"), (b"A" * 15, "A" * 15)],
    ids=["no line of the launch", "without its command line"],
)
def test_the_name_of_a_holder_is_the_kernels(name, shown):
    """psutil completes one of 15 bytes from the command line, which may hold anything and whose reads may wait."""
    code = f"""
import ctypes, socket, time
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""
    line = name.decode(errors="surrogateescape") + "\ncpulaunch: error: " + "B" * 1000
    with subprocess.Popen([line, "-c", code], executable=sys.executable, stdout=subprocess.PIPE) as process:
        try:
            holder = port_holder(int(process.stdout.readline()))
        finally:
            process.kill()
    assert holder == f"{shown} (pid {process.pid})"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_port_has_no_known_holder():
    code = (
        "import os, psutil, sys; from cpulaunch.launch.ranks.port import port_holder; os.setuid(65534); "
        "print(port_holder(int(sys.argv[1])))"
    )
    with listening(0) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", code, port], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_a_name_that_does_not_resolve_is_an_error():
    with pytest.raises(LaunchError, match="does not resolve"):
        check_address("no-such-host.invalid")
    for address in ("localhost", "127.0.0.1", "::1", "127.0.0.2"):
        check_address(address)


NARROW = """
    import socket, sys
    sys.path.insert(0, sys.argv[1])
    from cpulaunch.launch.ranks.port import PortReservation

    # The kernel has four ports to choose from: two are reserved here, two are left.
    held = [PortReservation(None) for _ in range(2)]
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

    # No connection leaves from a reserved port either: it would connect to itself.
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
def test_the_kernel_gives_a_reserved_port_to_no_other_socket():
    code = f"echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range; ip link set lo up; exec {sys.executable} - $0"
    namespace = ["unshare", "--net", "sh", "-c", code, str(ROOT)]
    done = subprocess.run(
        namespace, input=textwrap.dedent(NARROW), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
