"""How ranks of several hosts learn that one has ended, and that all do the same: without torch, without the library."""

import ctypes
import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpulaunch.worker.ccl.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.lines import open_lines
from cpulaunch.worker.ccl.roll_call import RollCall

SECONDS = 20
HERE = "127.0.0.1"


class Store:
    """What the ranks of these tests share instead of torch's store: each key is waited for."""

    def __init__(self):
        self._read, self._write = os.pipe()

    def set(self, key, value):
        os.write(self._write, value.encode())

    def get(self, key):
        select.select([self._read], [], [])
        said = os.read(self._read, 4096)
        os.write(self._write, said)
        return said


def opened(size, visit=lambda store: None):
    """The lines of all ranks; `visit` happens before the first rank's are all there."""
    store = Store()
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(open_lines, store, HERE, rank=0, size=size, seconds=SECONDS)
        visit(store)
        others = [pool.submit(open_lines, store, HERE, rank=r, size=size, seconds=SECONDS) for r in range(1, size)]
        return [each.result() for each in (first, *others)]


def eventually_lost(lines):
    """What the lines say once they say something: what another has sent is on its way."""
    poll = select.poll()
    for line in lines._sockets.values():
        poll.register(line, select.POLLIN)
    assert poll.poll(SECONDS * 1000)
    return lines.lost()


def test_nobody_is_lost_while_all_are_there():
    every = opened(3)
    assert [lines.lost() for lines in every] == [None, None, None]


def test_the_first_rank_sees_who_ends_and_tells_the_others():
    first, second, third = opened(3)
    second.close()
    assert eventually_lost(first) == (1, os.getpid())
    assert eventually_lost(third) == (1, os.getpid())
    assert third.lost() == (1, os.getpid())


def test_all_see_that_the_first_rank_ends():
    first, second, third = opened(3)
    first.close()
    assert [eventually_lost(lines) for lines in (second, third)] == [(0, os.getpid())] * 2


def test_a_forked_child_keeps_no_line():
    first, second = opened(2)
    child = os.fork()
    if child == 0:
        os._exit(len(first._sockets) + len(second._sockets))
    assert os.waitpid(child, 0)[1] == 0
    assert first.lost() is None


def test_somebody_else_at_the_door_is_turned_away():
    def visit(store):
        address, port, _ = store.get("lines/place").decode().split()
        with socket.create_connection((address, int(port)), timeout=SECONDS) as line:
            line.sendall(bytes(40))
            assert line.recv(1) == b""

    assert [lines.lost() for lines in opened(2, visit)] == [None, None]


def test_a_rank_that_does_not_come_is_not_waited_for_forever():
    with pytest.raises(PeerLostError, match="not all ranks of the group were there within 0 s"):
        open_lines(Store(), HERE, rank=0, size=2, seconds=0.01)


def test_an_address_that_is_not_this_hosts_names_the_variable():
    with pytest.raises(CclError, match="GLOO_SOCKET_IFNAME"):
        open_lines(Store(), "192.0.2.1", rank=0, size=2, seconds=1)


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
    RollCall(Gathered(call_of(1) * 2), None, size=3, describe=repr).meet(call_of(1), SECONDS)


def test_the_first_that_does_something_else_is_named():
    roll = RollCall(Gathered(call_of(1) + call_of(2)), None, size=3, describe=lambda call: f"call {call[0]}")
    with pytest.raises(RanksDisagreeError, match="rank 0 calls call 1, rank 2 call 2"):
        roll.meet(call_of(1), SECONDS)
