"""Waiting for signals and for a child's end, in the order in which they matter."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpulaunch.launch.process.child_watch import ChildWatch
from tests.launch.launching import eventually

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="macOS has no timed wait for signals")

ENDING, OTHER = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def blocked():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {ENDING, OTHER, signal.SIGCHLD})
    yield
    while signal.sigtimedwait({ENDING, OTHER, signal.SIGCHLD}, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def watch(pid):
    return ChildWatch(pid, urgent=(frozenset({ENDING}), frozenset({signal.SIGCHLD})), others=frozenset({OTHER}))


def test_a_signal_that_ends_the_launch_comes_before_lower_numbers(child):
    """A worker that sends the guard SIGUSR1 again and again would keep SIGTERM waiting."""
    watched = watch(child.pid)
    for number in (OTHER, signal.SIGCHLD, ENDING):
        signal.raise_signal(number)  # To this thread: others of the test runner do not block it.
    assert [watched.next_signal(0.0) for _ in range(4)] == [ENDING, signal.SIGCHLD, OTHER, None]


def test_the_wait_ends_in_time(child):
    began = time.monotonic()
    assert watch(child.pid).next_signal(0.1) is None
    assert time.monotonic() - began >= 0.1


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd")
def test_the_end_of_the_child_is_noticed_without_a_signal(child):
    watched = watch(child.pid)
    assert not watched.child_has_ended()
    child.kill()
    eventually(watched.child_has_ended, "the end of the child")
    assert watched.next_signal() == signal.SIGCHLD


def test_without_pidfd_a_signal_is_still_waited_for():
    watched = watch(1 << 22)  # No process has this pid.
    signal.raise_signal(ENDING)
    assert watched.next_signal() == ENDING
    assert watched.next_signal(0.0) is None
    assert not watched.child_has_ended()
