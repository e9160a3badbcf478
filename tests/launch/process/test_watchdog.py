"""The guard notices a supervisor that does not read the signal that is to end the launch."""

import os
import signal
import sys
import threading
import time

import pytest

from cpulaunch.launch.process.child_watch import ChildWatch
from cpulaunch.launch.process.watchdog import QUESTION, Watchdog
from cpulaunch.system.libc import private_pipe, stop_writing

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="macOS has no timed wait for signals")

NEVER = ChildWatch(os.getpid(), urgent=(), others=frozenset({signal.SIGUSR2}))


@pytest.fixture(autouse=True)
def blocked():
    """As in the guard, which waits for all signals: this process would end at one."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(params=[os.pipe, private_pipe], ids=["pipe", "private pipe"])
def pipe(request):
    read, write = request.param()
    yield read, write
    os.close(read)
    os.close(write)


def watchdog(read, write):
    return Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0)


def test_a_signal_that_is_not_read_has_a_deadline(pipe):
    dog = watchdog(*pipe)
    dog.forward(signal.SIGTERM)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_after_the_deadline_the_guard_is_told_again_and_again(pipe):
    """A process that is held at its end may need more than one kill."""
    dog = watchdog(*pipe)
    dog.forward(signal.SIGTERM)
    assert [dog.next_signal(NEVER), dog.next_signal(NEVER)] == [None, None]
    assert dog.exit_code == 128 + signal.SIGTERM


def test_an_answered_signal_has_no_deadline(pipe):
    dog = watchdog(*pipe)
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1)
    time.sleep(0.8)
    signal.raise_signal(signal.SIGUSR2)  # To this thread: others of the test runner do not block it.
    assert dog.next_signal(NEVER) == signal.SIGUSR2


def test_a_signal_for_which_the_pipe_has_no_room_has_a_deadline_too(pipe):
    """A worker that stops the supervisor can fill the pipe with signals that the guard forwards."""
    dog = watchdog(*pipe)
    for _ in range(1 << 16):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_another_signal_that_is_read_is_no_answer_to_one_that_had_no_room(pipe):
    """A worker that goes on to send signals, and lets the supervisor read them, must not hide a lost SIGTERM."""
    dog = watchdog(*pipe)
    for _ in range(1 << 16):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    assert signal.SIGTERM not in os.read(pipe[0], 1 << 17)
    dog.forward(signal.SIGWINCH)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_the_same_signal_sent_again_and_read_is_an_answer(pipe):
    dog = watchdog(*pipe)
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
    read, write = private_pipe()
    dog = watchdog(os.dup(read), write)
    os.close(read)
    dog.forward(signal.SIGTERM)
    assert dog.next_signal(NEVER) is None
    os.close(write)


@pytest.fixture
def soon(monkeypatch):
    """A question that is to be answered at once, as the test waits for the deadline."""
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.QUESTION_SECONDS", 0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pipe has one direction")
def test_a_supervisor_that_is_stopped_after_it_has_read_the_signal_does_not_answer(soon):
    read, write = private_pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    assert os.read(read, 9) == bytes([signal.SIGTERM])
    assert dog.next_signal(NEVER) is None
    assert os.read(read, 9) == bytes([QUESTION])
    assert dog.exit_code == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pipe has one direction")
def test_a_supervisor_is_asked_until_it_has_finished(soon):
    read, write = private_pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    asked = []

    def answer():
        while (number := os.read(read, 1)) != bytes([signal.SIGUSR1]):
            asked.append(number)
            if asked[1:] == [bytes([QUESTION])] * 3:
                stop_writing(read)

    supervisor = threading.Thread(target=answer)
    supervisor.start()
    threading.Timer(2.0, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    assert dog.next_signal(NEVER) == signal.SIGUSR2
    dog.forward(signal.SIGUSR1)
    supervisor.join()
    assert asked == [bytes([signal.SIGTERM]), *[bytes([QUESTION])] * 3]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pipe has one direction")
def test_a_supervisor_that_has_finished_has_a_deadline_for_its_reports(monkeypatch):
    """They may be on a file system that hangs, or in a pipe that is not read."""
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.REPORT_SECONDS", 0.1)
    read, write = private_pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    assert os.read(read, 9) == bytes([signal.SIGTERM])
    stop_writing(read)
    assert dog.next_signal(NEVER) is None
    assert (dog.exit_code, dog.complaint) == (143, "reports were not written in time after signal 15")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pipe has one direction")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_another_signal_ends_reports_that_take_long(soon, number):
    read, write = private_pipe()
    ending = frozenset({signal.SIGTERM, signal.SIGINT})
    dog = Watchdog(write, unread=read, ending=ending, grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    assert os.read(read, 9) == bytes([signal.SIGTERM])
    stop_writing(read)
    threading.Timer(1.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    assert dog.next_signal(NEVER) == signal.SIGUSR2
    dog.forward(number)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_where_the_end_of_the_workers_is_not_known_reports_have_no_deadline(monkeypatch):
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.REPORT_SECONDS", 0.1)
    read, write = os.pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    os.read(read, 9)
    threading.Timer(1.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    assert dog.next_signal(NEVER) == signal.SIGUSR2
