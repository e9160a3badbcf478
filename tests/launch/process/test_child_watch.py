"""Waiting for signals and for a child's end, in the order in which they matter."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cpulaunch.launch.process import child_watch
from cpulaunch.launch.process.child_watch import ChildWatch, wait_for_exit
from cpulaunch.launch.process.guard import _stop_with_shell_job
from cpulaunch.launch.process.processes import ended_child
from cpulaunch.system.libc import is_linux
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


THREAD_TRACED_BY_CHILD = """
import ctypes, os, signal, threading, time
thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
thread.start()
tracer = os.fork()
if tracer == 0:
    os.setsid()
    if ctypes.CDLL(None).ptrace(0x4206, thread.native_id, 0, 0) != 0:  # Source: linux/ptrace.h, PTRACE_SEIZE.
        print(0, flush=True)
        os._exit(0)
    print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def child_with_traced_thread():
    child = subprocess.Popen([sys.executable, "-c", THREAD_TRACED_BY_CHILD], stdout=subprocess.PIPE)
    tracer = int(child.stdout.readline())
    try:
        if not tracer:
            pytest.skip("no process may be traced here")
        yield child
    finally:
        child.kill()
        if tracer:
            os.kill(tracer, signal.SIGKILL)
        child.wait()
        child.stdout.close()


@pytest.mark.skipif(not is_linux(), reason="other systems have no PTRACE_SEIZE")
@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("seconds", [None, 60.0])
def test_the_end_of_a_child_is_noticed_of_which_another_process_traces_a_thread(
    child_with_traced_thread, monkeypatch, has_pidfd, seconds
):
    """Nothing but /proc shows it."""
    monkeypatch.setattr(child_watch, "CHECK_SECONDS", 0.05)
    if not has_pidfd:
        monkeypatch.setattr(child_watch, "open_pidfd", lambda pid: None)
    watched = watch(child_with_traced_thread.pid)
    assert watched.next_signal(0.1) is None
    child_with_traced_thread.kill()
    assert watched.next_signal(seconds) == signal.SIGCHLD
    assert ended_child(child_with_traced_thread.pid) is None


class _Forwarded(list):
    """In place of a watchdog: the signals that were forwarded."""

    forward = list.append


def _stop_and_continue(pid):
    """The exit code of a process that gets SIGTSTP, and SIGCONT before it stops for it: 0 if it forwards it later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP, signal.SIGCONT})
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    watched = ChildWatch(pid, urgent=(), others=frozenset({signal.SIGCONT}), kept=frozenset({signal.SIGTSTP}))
    os.kill(os.getpid(), signal.SIGTSTP)
    if watched.next_signal() != signal.SIGTSTP:
        return 1
    os.kill(os.getpid(), signal.SIGCONT)
    forwarded = _Forwarded()
    _stop_with_shell_job(forwarded)
    return 2 if forwarded or watched.next_signal() != signal.SIGCONT else 0


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_job_that_is_continued_at_once_does_not_stay_stopped(has_pidfd):
    tested = os.fork()
    if tested == 0:
        os.setpgid(0, 0)  # As a shell's job, which its parent can continue.
        os._exit(_stop_and_continue(os.getppid() if has_pidfd else 1 << 22))
    _, status = os.waitpid(tested, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(tested, signal.SIGKILL)
        os.waitpid(tested, 0)
    assert status == 0


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_kept_signal_is_returned_until_it_is_delivered(child, has_pidfd):
    watched = ChildWatch(child.pid if has_pidfd else 1 << 22, urgent=(), kept=frozenset({OTHER}))
    signal.raise_signal(OTHER)
    assert [watched.next_signal(0.0) for _ in range(2)] == [OTHER, OTHER]
    assert signal.sigtimedwait({OTHER}, 0) is not None
    assert watched.next_signal(0.0) is None


LEAVING = """
import os, signal, time
from cpulaunch.launch.process import child_watch
from cpulaunch.system.libc import adopt_orphans

assert adopt_orphans()
told, tell = os.pipe()
child = os.fork()
if child == 0:
    if left := os.fork():
        os.write(tell, b"%d" % left)
    signal.pause()
left = int(os.read(told, 20))
plain = child_watch.endable_children

def children():
    found = plain()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return found

child_watch.endable_children = children
begun = time.monotonic()
child_watch.await_ends(0.3, frozenset())
print(time.monotonic() - begun >= 0.3)
os.kill(left, signal.SIGKILL)
"""


@pytest.mark.skipif(not is_linux(), reason="only Linux lets a process adopt orphans")
def test_what_a_child_leaves_while_its_end_is_awaited_is_awaited_too():
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n", done.stderr


TRACED_BY_ITS_PARENT = """
import ctypes, os, signal
if ctypes.CDLL(None).ptrace(0, 0, None, None) == 0:  # Source: linux/ptrace.h, PTRACE_TRACEME.
    print("traced", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def traced_child():
    """A child that this process traces, and that has stopped."""
    child = subprocess.Popen([sys.executable, "-c", TRACED_BY_ITS_PARENT], stdout=subprocess.PIPE)
    try:
        if not child.stdout.readline():
            pytest.skip("no process may be traced here")
        assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT).si_code == os.CLD_TRAPPED
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.skipif(not is_linux(), reason="other systems have no PTRACE_TRACEME")
def test_a_child_that_this_process_traces_has_not_ended_when_it_stops(traced_child):
    """waitid(2) shows a tracer the stops too, also where only ends are asked for."""
    assert ended_child(traced_child.pid) is None
    traced_child.kill()
    assert eventually(lambda: ended_child(traced_child.pid) is not None)
    assert ended_child(traced_child.pid).status == -signal.SIGKILL


@pytest.mark.skipif(not is_linux(), reason="other systems have no PTRACE_TRACEME")
def test_the_end_of_a_child_that_this_process_traces_is_awaited_without_pidfds(traced_child, monkeypatch):
    monkeypatch.setattr(child_watch, "open_pidfd", lambda pid: None)
    killer = threading.Timer(0.2, traced_child.kill)
    killer.start()
    assert wait_for_exit(traced_child.pid) == -signal.SIGKILL
    killer.join()


def test_children_that_stop_without_end_hold_nothing_up(monkeypatch):
    stops = itertools.repeat(SimpleNamespace(si_pid=1, si_code=os.CLD_STOPPED), 1 << 16)
    monkeypatch.setattr(os, "waitid", lambda *_: next(stops))
    assert ended_child() is None
