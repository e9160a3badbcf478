"""The guard notices a supervisor that does not read the signal that is to end the launch."""

import os
import signal
import threading
import time

import pytest

from cpulaunch.launch.process.child_watch import ChildWatch
from cpulaunch.launch.process.watchdog import Watchdog

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="macOS has no timed wait for signals")

NEVER = ChildWatch(os.getpid(), urgent=(), others=frozenset({signal.SIGUSR2}))


@pytest.fixture(autouse=True)
def blocked():
    """As in the guard, which waits for all signals: this process would end at one."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def watchdog(write):
    return Watchdog(write, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0)


def test_a_signal_that_is_not_read_has_a_deadline(pipe):
    dog = watchdog(pipe[1])
    dog.forward(signal.SIGTERM)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_after_the_deadline_the_guard_is_told_again_and_again(pipe):
    """A process that is held at its end may need more than one kill."""
    dog = watchdog(pipe[1])
    dog.forward(signal.SIGTERM)
    assert [dog.next_signal(NEVER), dog.next_signal(NEVER)] == [None, None]
    assert dog.exit_code == 128 + signal.SIGTERM


def test_an_answered_signal_has_no_deadline(pipe):
    dog = watchdog(pipe[1])
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1)
    time.sleep(0.8)
    signal.raise_signal(signal.SIGUSR2)  # To this thread: others of the test runner do not block it.
    assert dog.next_signal(NEVER) == signal.SIGUSR2


def test_a_signal_for_which_the_pipe_has_no_room_has_a_deadline_too(pipe):
    """A worker that stops the supervisor can fill the pipe with signals that the guard forwards."""
    dog = watchdog(pipe[1])
    for _ in range(1 << 16):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_another_signal_that_is_read_is_no_answer_to_one_that_had_no_room(pipe):
    """A worker that goes on to send signals, and lets the supervisor read them, must not hide a lost SIGTERM."""
    dog = watchdog(pipe[1])
    for _ in range(1 << 16):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    assert signal.SIGTERM not in os.read(pipe[0], 1 << 17)
    dog.forward(signal.SIGWINCH)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_the_same_signal_sent_again_and_read_is_an_answer(pipe):
    dog = watchdog(pipe[1])
    for _ in range(1 << 16):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1 << 17)
    dog.forward(signal.SIGTERM)
    assert os.read(pipe[0], 2) == bytes([signal.SIGTERM])
    threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    assert dog.next_signal(NEVER) == signal.SIGUSR2


def test_a_signal_for_a_supervisor_that_has_ended_has_a_deadline_too():
    """The inner guard does not see the end of a supervisor that an orphan traces."""
    read, write = os.pipe()
    dog = watchdog(write)
    os.close(read)
    dog.forward(signal.SIGTERM)
    assert dog.next_signal(NEVER) is None
    os.close(write)
