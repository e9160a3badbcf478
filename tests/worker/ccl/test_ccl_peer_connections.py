"""How ranks of several hosts learn that one has ended, and that all do the same: without torch, without the library."""

import ctypes
import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpulaunch.worker.ccl.oneccl.call_check import CallCheck
from cpulaunch.worker.ccl.oneccl.peer_connections import (
    ADDRESS_KEY,
    PROCESS,
    TOKEN_BYTES,
    PeerConnections,
    open_connections,
)
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError

SECONDS = 20
HERE = "127.0.0.1"


class Store:
    """What the ranks of these tests share instead of torch's store: each key is waited for."""

    def __init__(self):
        self._read, self._write = os.pipe()

    def set(self, key, value):
        os.write(self._write, value.encode())

    def get(self, key):
        ready = select.poll()  # select.select() takes no descriptor above 1023.
        ready.register(self._read, select.POLLIN)
        ready.poll()
        said = os.read(self._read, 4096)
        os.write(self._write, said)
        return said


def opened(size, visit=lambda store: None):
    """The lines of all ranks; `visit` happens before the first rank's are all there."""
    store = Store()
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(open_connections, store, HERE, rank=0, size=size, seconds=SECONDS)
        visit(store)
        others = [
            pool.submit(open_connections, store, HERE, rank=r, size=size, seconds=SECONDS) for r in range(1, size)
        ]
        return [each.result() for each in (first, *others)]


def eventually_lost(lines):
    """What the lines say once they say something: what another has sent is on its way."""
    poll = select.poll()
    for line in lines._sockets.values():
        poll.register(line, select.POLLIN)
    assert poll.poll(SECONDS * 1000)
    return lines.lost_peer()


def test_nobody_is_lost_while_all_are_there():
    every = opened(3)
    assert [lines.lost_peer() for lines in every] == [None, None, None]


def test_the_first_rank_sees_who_ends_and_tells_the_others():
    first, second, third = opened(3)
    second.close()
    assert eventually_lost(first) == (1, os.getpid())
    assert eventually_lost(third) == (1, os.getpid())
    assert third.lost_peer() == (1, os.getpid())


def test_all_see_that_the_first_rank_ends():
    first, second, third = opened(3)
    first.close()
    assert [eventually_lost(lines) for lines in (second, third)] == [(0, os.getpid())] * 2


def test_threads_that_wait_for_works_of_one_group_may_look_at_once():
    first, _ = opened(2)
    troubles = []

    def look():
        try:
            for _ in range(5000):
                assert first.lost_peer() is None
        except RuntimeError as error:
            troubles.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []


def test_a_line_that_said_nothing_after_all_is_no_loss():
    here, there = socket.socketpair()
    lines = PeerConnections()
    with here, there:
        here.setblocking(False)
        lines._sockets[1], lines._processes[1] = here, 77
        assert lines._report_from(1) is None
        there.sendall(PROCESS.pack(4, 5))
        assert lines._report_from(1) == (4, 5)
        there.sendall(PROCESS.pack(4, 5)[:3])
        there.close()
        assert lines._report_from(1) == (1, 77)


def test_news_that_is_on_its_way_is_waited_for():
    first, second = opened(2)
    threading.Timer(0.2, second.close).start()
    assert first.lost_peer() is None
    assert first.lost_peer(SECONDS) == (1, os.getpid())


def test_a_child_can_close_what_another_thread_looks_at():
    first, _ = opened(2)
    with first._lock:
        child = os.fork()
        if child == 0:
            os._exit(len(first))
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_keeps_no_line():
    first, second = opened(2)
    child = os.fork()
    if child == 0:
        os._exit(len(first) + len(second))
    assert os.waitpid(child, 0)[1] == 0
    assert first.lost_peer() is None


def test_somebody_else_at_the_door_is_turned_away():
    def visit(store):
        address, port, _ = store.get(ADDRESS_KEY).decode().split()
        with socket.create_connection((address, int(port)), timeout=SECONDS) as line:
            line.sendall(bytes(40))
            assert line.recv(1) == b""

    assert [lines.lost_peer() for lines in opened(2, visit)] == [None, None]


def test_a_rank_that_does_not_come_is_not_waited_for_forever():
    with pytest.raises(PeerLostError, match="not all ranks of the group connected within 0 s"):
        open_connections(Store(), HERE, rank=0, size=2, seconds=0.01)


def greeting(store, rank):
    """Another rank at the listener, and what it has to say there."""
    address, port, token = store.get(ADDRESS_KEY).decode().split()
    return socket.create_connection((address, int(port)), timeout=SECONDS), token.encode() + PROCESS.pack(rank, 7)


def test_ranks_that_are_there_are_let_go_when_another_does_not_come():
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_connections, store, HERE, rank=0, size=3, seconds=3)
        line, said = greeting(store, 1)
        with line:
            line.sendall(said)
            assert line.recv(PROCESS.size) == PROCESS.pack(0, os.getpid())
            assert line.recv(1) == b""
            with pytest.raises(PeerLostError):
                first.result()


def test_who_keeps_knocking_does_not_make_the_first_rank_wait_longer():
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_connections, store, HERE, rank=0, size=2, seconds=0.5)
        place = store.get(ADDRESS_KEY).decode().split()
        while not first.done():
            try:
                with socket.create_connection((place[0], int(place[1])), timeout=SECONDS) as line:
                    line.sendall(bytes(TOKEN_BYTES + PROCESS.size))
                    line.recv(1)
            except OSError:
                continue  # The listener is closed.
        assert isinstance(first.exception(), PeerLostError)


def test_a_rank_that_dies_at_the_door_does_not_let_anybody_in():
    def visit(store):
        line, said = greeting(store, 1)
        line.sendall(said[:-3])
        line.close()

    assert [lines.lost_peer() for lines in opened(2, visit)] == [None, None]


def test_a_first_rank_that_gives_up_is_named():
    store = Store()
    with socket.create_server((HERE, 0)) as listener, ThreadPoolExecutor(1) as pool:
        store.set(ADDRESS_KEY, f"{HERE} {listener.getsockname()[1]} {'0' * TOKEN_BYTES}")
        other = pool.submit(open_connections, store, HERE, rank=1, size=2, seconds=SECONDS)
        line = listener.accept()[0]
        line.recv(TOKEN_BYTES + PROCESS.size)
        line.close()
        with pytest.raises(PeerLostError, match="rank 0 of the group exited"):
            other.result()


def test_an_address_that_is_not_this_hosts_names_the_variable():
    with pytest.raises(CclError, match="GLOO_SOCKET_IFNAME"):
        open_connections(Store(), "192.0.2.1", rank=0, size=2, seconds=1)


class Gathered:
    """A communicator in which the other ranks have said what they do."""

    def __init__(self, others):
        self._others = others

    def all_gather(self, source, target, count, kind):
        mine = ctypes.string_at(source, 8 * count)
        ctypes.memmove(target, mine + self._others, 8 * count + len(self._others))


def call_of(number):
    return bytes([number]) * 16


def test_ranks_that_do_the_same_go_on():
    CallCheck(Gathered(call_of(1) * 2), None, size=3, describe=repr).synchronize(call_of(1), SECONDS)


def test_the_first_that_does_something_else_is_named():
    roll = CallCheck(Gathered(call_of(1) + call_of(2)), None, size=3, describe=lambda call: f"call {call[0]}")
    with pytest.raises(RanksDisagreeError, match="rank 0 calls call 1, rank 2 calls call 2"):
        roll.synchronize(call_of(1), SECONDS)


class Failed:
    """A communicator that has lost its connections."""

    has_failed = True


def test_who_ended_is_known_when_oneccl_is_the_first_to_see_it():
    first, second = opened(2)
    threading.Timer(0.2, second.close).start()
    assert CallCheck(Failed(), first, size=2, describe=repr).lost_peer() == (1, os.getpid())
