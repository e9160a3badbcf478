"""Lost ranks and different calls between ranks of several hosts; these tests need neither torch nor oneCCL."""

import asyncio
import ctypes
import os
import resource
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from cpulaunch.worker.ccl.oneccl.call_check import CallCheck
from cpulaunch.worker.ccl.oneccl.handshakes import MAX_CALLERS, PROCESS, TOKEN_BYTES, accept_ranks
from cpulaunch.worker.ccl.oneccl.peer_connections import ADDRESS_KEY, PeerConnections, open_connections
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from tests.strangers import UID

SECONDS = 20
LOCALHOST = "127.0.0.1"


class Store:
    """A replacement for torch's store with a single value; `get` waits until it is set."""

    def __init__(self):
        self._read, self._write = os.pipe()

    def set(self, key, value):
        os.write(self._write, value.encode())

    def get(self, key):
        ready = select.poll()  # select.select() takes no descriptor above 1023.
        ready.register(self._read, select.POLLIN)
        ready.poll()
        value = os.read(self._read, 4096)
        os.write(self._write, value)
        return value


def opened(size, before=lambda store: None):
    """The connections of all ranks; `before` runs while rank 0 waits, before the others connect."""
    store = Store()
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(open_connections, store, LOCALHOST, rank=0, size=size, seconds=SECONDS)
        before(store)
        others = [
            pool.submit(open_connections, store, LOCALHOST, rank=r, size=size, seconds=SECONDS) for r in range(1, size)
        ]
        return [each.result() for each in (first, *others)]


def eventually_lost(connections):
    """The lost peer that connections report, after waiting until one has data."""
    poll = select.poll()
    for connection in connections._sockets.values():
        poll.register(connection, select.POLLIN)
    assert poll.poll(SECONDS * 1000)
    return connections.lost_peer()


def test_no_rank_is_lost_while_all_are_connected():
    every = opened(3)
    assert [connections.lost_peer() for connections in every] == [None, None, None]


def test_rank_zero_notifies_the_others_of_a_lost_rank():
    first, second, third = opened(3)
    second.close()
    assert eventually_lost(first) == (1, os.getpid())
    assert eventually_lost(third) == (1, os.getpid())
    assert third.lost_peer() == (1, os.getpid())


def test_all_ranks_notice_the_loss_of_rank_zero():
    first, second, third = opened(3)
    first.close()
    assert [eventually_lost(connections) for connections in (second, third)] == [(0, os.getpid())] * 2


def test_several_threads_may_check_for_lost_peers():
    first, _ = opened(2)
    errors = []

    def check():
        try:
            for _ in range(5000):
                assert first.lost_peer() is None
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=check) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_connection_without_data_is_not_a_loss():
    here, there = socket.socketpair()
    connections = PeerConnections()
    with here, there:
        here.setblocking(False)
        connections._sockets[1], connections._processes[1] = here, 77
        assert connections._report_from(1) is None
        there.sendall(PROCESS.pack(4, 5))
        assert connections._report_from(1) == (4, 5)
        there.sendall(PROCESS.pack(4, 5)[:3])
        there.close()
        assert connections._report_from(1) == (1, 77)


def test_lost_peer_waits_for_a_notice():
    first, second = opened(2)
    threading.Timer(0.2, second.close).start()
    assert first.lost_peer() is None
    assert first.lost_peer(SECONDS) == (1, os.getpid())


def test_a_forked_child_closes_connections_whose_lock_is_held():
    first, _ = opened(2)
    with first._lock:
        child = os.fork()
        if child == 0:
            os._exit(len(first))
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_keeps_no_connection():
    first, second = opened(2)
    child = os.fork()
    if child == 0:
        os._exit(len(first) + len(second))
    assert os.waitpid(child, 0)[1] == 0
    assert first.lost_peer() is None


def test_a_connection_with_a_wrong_token_is_closed():
    def before(store):
        address, port, _ = store.get(ADDRESS_KEY).decode().split()
        with socket.create_connection((address, int(port)), timeout=SECONDS) as connection:
            connection.sendall(bytes(40))
            assert connection.recv(1) == b""

    assert [connections.lost_peer() for connections in opened(2, before)] == [None, None]


def test_rank_zero_fails_after_the_timeout_if_a_rank_is_missing():
    with pytest.raises(PeerLostError, match="not all ranks of the group connected within 0 s"):
        open_connections(Store(), LOCALHOST, rank=0, size=2, seconds=0.01)


def connect_as(store, rank):
    """A connection of another rank to rank 0, and the handshake that it has to send."""
    address, port, token = store.get(ADDRESS_KEY).decode().split()
    return socket.create_connection((address, int(port)), timeout=SECONDS), token.encode() + PROCESS.pack(rank, 7)


def test_connected_ranks_are_disconnected_if_another_is_missing():
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_connections, store, LOCALHOST, rank=0, size=3, seconds=3)
        connection, handshake = connect_as(store, 1)
        with connection:
            connection.sendall(handshake)
            assert connection.recv(PROCESS.size) == PROCESS.pack(0, os.getpid())
            assert connection.recv(1) == b""
            with pytest.raises(PeerLostError):
                first.result()


def test_repeated_foreign_connections_do_not_extend_the_timeout():
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_connections, store, LOCALHOST, rank=0, size=2, seconds=0.5)
        published = store.get(ADDRESS_KEY).decode().split()
        while not first.done():
            try:
                with socket.create_connection((published[0], int(published[1])), timeout=SECONDS) as connection:
                    connection.sendall(bytes(TOKEN_BYTES + PROCESS.size))
                    connection.recv(1)
            except OSError:
                continue  # The listener is closed.
        assert isinstance(first.exception(), PeerLostError)


def test_a_connection_closed_during_the_handshake_is_ignored():
    def before(store):
        connection, handshake = connect_as(store, 1)
        connection.sendall(handshake[:-3])
        connection.close()

    assert [connections.lost_peer() for connections in opened(2, before)] == [None, None]


def strangers(attack):
    """A function for `opened` that runs attack(address) in a process of another user while the ranks connect."""

    def before(store):
        address, port, _ = store.get(ADDRESS_KEY).decode().split()
        ready, started = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if os.geteuid() == 0:
                    os.setresuid(UID, UID, UID)
                keep = attack((address, int(port)))
                os.write(started, b"x")
                for _ in range(SECONDS * 10):
                    for connection in keep:
                        with suppress(OSError):
                            connection.send(b"x")
                    time.sleep(0.1)
            finally:
                os._exit(0)
        attackers.append(pid)
        os.close(started)
        os.read(ready, 1)
        os.close(ready)

    attackers = []
    return before, attackers


def many(address):
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
    return [socket.create_connection(address, timeout=SECONDS) for _ in range(500)]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda address: [socket.create_connection(address)], id="one that drips"),
        pytest.param(lambda address: [socket.create_connection(address) for _ in range(20)], id="more than the ranks"),
        pytest.param(many, id="500"),
    ],
)
def test_strangers_do_not_delay_the_ranks(attack):
    before, attackers = strangers(attack)
    start = time.monotonic()
    try:
        assert [connections.lost_peer() for connections in opened(3, before)] == [None, None, None]
        assert time.monotonic() - start < 5
    finally:
        for pid in attackers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_rank_is_found_among_strangers_that_connected_after_it_before_rank_zero_looked(capfd):
    found, token = [], bytes(TOKEN_BYTES)
    with ExitStack() as connections:
        listener = connections.enter_context(socket.create_server((LOCALHOST, 0), backlog=2 * MAX_CALLERS))
        rank = connections.enter_context(socket.create_connection(listener.getsockname()))
        rank.sendall(token + PROCESS.pack(1, 7))
        for _ in range(MAX_CALLERS + 10):
            connections.enter_context(socket.create_connection(listener.getsockname()))
        asyncio.run(
            accept_ranks(listener, lambda *each: found.append(each[1:]), token=token, ranks=[1], seconds=SECONDS)
        )
    assert found == [(1, 7)]
    assert capfd.readouterr().err == ""


def test_a_rank_whose_connection_is_closed_before_it_is_identified_connects_again():
    store = Store()
    with socket.create_server((LOCALHOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        store.set(ADDRESS_KEY, f"{LOCALHOST} {listener.getsockname()[1]} {'0' * TOKEN_BYTES}")
        other = pool.submit(open_connections, store, LOCALHOST, rank=1, size=2, seconds=SECONDS)
        listener.accept()[0].close()
        with listener.accept()[0] as connection:
            assert len(connection.recv(TOKEN_BYTES + PROCESS.size)) == TOKEN_BYTES + PROCESS.size
            connection.sendall(PROCESS.pack(0, 7))
            assert other.result().lost_peer() is None


def test_a_stranger_that_drips_does_not_extend_the_timeout():
    store = Store()
    before, attackers = strangers(lambda address: [socket.create_connection(address)])
    start = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(open_connections, store, LOCALHOST, rank=0, size=2, seconds=1.5)
            before(store)
            assert isinstance(first.exception(), PeerLostError)
        assert time.monotonic() - start < 4
    finally:
        for pid in attackers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_the_error_names_rank_zero_if_it_closes_the_connection():
    store = Store()
    with socket.create_server((LOCALHOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        store.set(ADDRESS_KEY, f"{LOCALHOST} {listener.getsockname()[1]} {'0' * TOKEN_BYTES}")
        other = pool.submit(open_connections, store, LOCALHOST, rank=1, size=2, seconds=SECONDS)
        connection = listener.accept()[0]
        connection.recv(TOKEN_BYTES + PROCESS.size)
        listener.close()
        connection.close()
        with pytest.raises(PeerLostError, match="rank 0 of the group exited"):
            other.result()


def test_the_error_for_a_foreign_address_names_the_variable():
    with pytest.raises(CclError, match="GLOO_SOCKET_IFNAME"):
        open_connections(Store(), "192.0.2.1", rank=0, size=2, seconds=1)


class Gathered:
    """A communicator in which the other ranks have sent their calls."""

    def __init__(self, others):
        self._others = others

    def run(self, function, source, target, count, kind):
        assert function == "AllGather"
        mine = ctypes.string_at(source, 8 * count)
        ctypes.memmove(target, mine + self._others, 8 * count + len(self._others))


def call_of(number):
    return bytes([number]) * 16


def test_equal_calls_are_accepted():
    CallCheck(Gathered(call_of(1) * 2), None, size=3, describe=repr).synchronize(call_of(1))


def test_the_error_names_the_first_rank_whose_call_differs():
    call_check = CallCheck(Gathered(call_of(1) + call_of(2)), None, size=3, describe=lambda call: f"call {call[0]}")
    with pytest.raises(RanksDisagreeError, match="rank 0 calls call 1, rank 2 calls call 2"):
        call_check.synchronize(call_of(1))


class Failed:
    """A communicator that has lost its connections."""

    has_failed = True


def test_call_check_waits_for_the_notice_after_oneccl_has_failed():
    first, second = opened(2)
    threading.Timer(0.2, second.close).start()
    assert CallCheck(Failed(), first, size=2, describe=repr).lost_peer() == (1, os.getpid())
