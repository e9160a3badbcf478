"""Lost ranks and different calls between ranks of several hosts; these tests do not need oneCCL."""

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
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch

from cpulaunch.worker.ccl.oneccl.path import OnecclPath
from cpulaunch.worker.ccl.oneccl.peers import NOTICE, PeerConnections
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import packed_call
from tests.strangers import UID

pytestmark = pytest.mark.torch
SECONDS = 20
LOCALHOST = "127.0.0.1"


def bound(size):
    """The connections of all ranks, and the members that tell where to connect, before any has connected."""
    every = [PeerConnections(rank) for rank in range(size)]
    rows = [connections.bind(LOCALHOST).split() for connections in every]
    return every, [(address, int(port), int(process)) for address, port, process in rows]


def opened(size, before=lambda address: None):
    """The connections of all ranks; `before` gets the address of rank 0, which waits, before the others connect."""
    every, members = bound(size)
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(every[0].connect, members, SECONDS)
        before(members[0][:2])
        others = [pool.submit(connections.connect, members, SECONDS) for connections in every[1:]]
        for each in (first, *others):
            each.result()
    return every


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
    connections = PeerConnections(0)
    with here, there:
        here.setblocking(False)
        connections._sockets[1], connections._processes = here, [70, 77]
        assert connections._report_from(1) is None
        there.sendall(NOTICE.pack(4, 5))
        assert connections._report_from(1) == (4, 5)
        there.sendall(NOTICE.pack(4, 5)[:3])
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
            os._exit(len(first._sockets))
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_keeps_no_connection():
    first, second = opened(2)
    child = os.fork()
    if child == 0:
        os._exit(len(first._sockets) + len(second._sockets))
    assert os.waitpid(child, 0)[1] == 0
    assert first.lost_peer() is None


def test_a_connection_from_elsewhere_is_closed():
    def before(address):
        with socket.create_connection(address, timeout=SECONDS) as connection:
            assert connection.recv(1) == b""

    assert [connections.lost_peer() for connections in opened(2, before)] == [None, None]


def test_rank_zero_fails_after_the_timeout_if_a_rank_is_missing():
    (first, _), members = bound(2)
    with pytest.raises(PeerLostError, match="not all ranks of the group connected within 0 s"):
        first.connect(members, 0.01)


def test_connected_ranks_are_disconnected_if_another_is_missing():
    (first, second, _), members = bound(3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.connect, members, 3)
        second.connect(members, SECONDS)
        assert eventually_lost(second) == (0, os.getpid())
        with pytest.raises(PeerLostError):
            waiting.result()


def test_repeated_foreign_connections_do_not_extend_the_timeout():
    (first, _), members = bound(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.connect, members, 0.5)
        while not waiting.done():
            with suppress(OSError), socket.create_connection(members[0][:2], timeout=SECONDS) as connection:
                connection.recv(1)
        assert isinstance(waiting.exception(), PeerLostError)


def strangers(attack):
    """A function for `opened` that runs attack(address) in a process of another user while the ranks connect."""

    def before(address):
        ready, started = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if os.geteuid() == 0:
                    os.setresuid(UID, UID, UID)
                keep = attack(address)
                os.write(started, b"x")
                for _ in range(SECONDS * 100):
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
        assert time.monotonic() - start < SECONDS
    finally:
        for pid in attackers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_rank_is_found_among_strangers_that_connected_before_it_and_before_rank_zero_looked():
    (first, second), members = bound(2)
    with ExitStack() as connections, ThreadPoolExecutor(1) as pool:
        for _ in range(300):
            connections.enter_context(socket.create_connection(members[0][:2], timeout=SECONDS))
        waiting = pool.submit(second.connect, members, SECONDS)
        first.connect(members, SECONDS)
        waiting.result()
        assert [first.lost_peer(), second.lost_peer()] == [None, None]


def test_a_stranger_that_drips_does_not_extend_the_timeout():
    before, attackers = strangers(lambda address: [socket.create_connection(address)])
    (first, _), members = bound(2)
    start = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.connect, members, 1.5)
            before(members[0][:2])
            assert isinstance(waiting.exception(), PeerLostError)
        assert time.monotonic() - start < 3 * SECONDS
    finally:
        for pid in attackers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_the_error_names_rank_zero_if_it_no_longer_listens():
    (first, second), members = bound(2)
    first.close()
    with pytest.raises(PeerLostError, match="rank 0 of the group exited"):
        second.connect(members, SECONDS)


def test_the_error_for_ranks_that_cannot_connect_names_the_variable():
    second = PeerConnections(1)
    second.bind(LOCALHOST)
    with pytest.raises(CclError, match="GLOO_SOCKET_IFNAME"):
        second.connect([("192.0.2.1", 9, 1), (LOCALHOST, 9, 1)], SECONDS)


class Gathered:
    """A communicator in which the other ranks have sent their calls."""

    def __init__(self, others):
        self._others = others

    def run(self, function, source, target, count, kind):
        assert function == "AllGather"
        mine = ctypes.string_at(source, 8 * count)
        ctypes.memmove(target, mine + self._others, 8 * count + len(self._others))

    def close(self):
        """Nothing to close."""


def call_of(count):
    return packed_call("all_reduce", torch.float32, count)


def path_of(communicator, connections=None, *, size):
    return OnecclPath(communicator, connections or PeerConnections(0), size=size)


def test_equal_calls_are_accepted():
    path_of(Gathered(call_of(1) * 2), size=3).run_call(call_of(1))


def test_the_error_names_the_first_rank_whose_call_differs():
    with pytest.raises(RanksDisagreeError, match=r"rank 0 calls all_reduce of 1 .*, rank 2 calls all_reduce of 2 "):
        path_of(Gathered(call_of(1) + call_of(2)), size=3).run_call(call_of(1))


class Failed(Gathered):
    """A communicator that has lost its connections."""

    has_failed = True


def test_lost_peer_waits_for_the_notice_after_oneccl_has_failed():
    first, second = opened(2)
    threading.Timer(0.2, second.close).start()
    assert path_of(Failed(b""), first, size=2).lost_peer() == (1, os.getpid())
