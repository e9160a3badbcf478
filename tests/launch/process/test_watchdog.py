"""The guard notices a supervisor that does not read the signal that is to end the launch."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cpulaunch.launch.process.child_watch import ChildWatch
from cpulaunch.launch.process.watchdog import QUESTION, FailureWatch, Watchdog
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


def fill(write):
    """As a worker can that takes the guard's end of the pipe (pidfd_getfd)."""
    while True:
        try:
            os.write(write, bytes([signal.SIGWINCH]))
        except BlockingIOError:
            return


def test_a_signal_that_ends_the_launch_has_room_behind_a_flood_of_others(pipe):
    """A worker that stops the supervisor can send the guard as many signals as it likes."""
    dog = watchdog(*pipe)
    for _ in range(1 << 10):
        dog.forward(signal.SIGWINCH)
    dog.forward(signal.SIGTERM)
    assert os.read(pipe[0], 1 << 17)[-1] == signal.SIGTERM


def test_a_stopped_job_can_be_continued_whatever_is_unread(pipe):
    dog = watchdog(*pipe)
    for number in (signal.SIGTSTP, *[signal.SIGWINCH] * 100, *[signal.SIGCONT, signal.SIGTSTP] * (1 << 10)):
        dog.forward(number)
    dog.forward(signal.SIGTERM)
    assert os.read(pipe[0], 1 << 17)[64:] == bytes([signal.SIGCONT, signal.SIGTERM])


def test_a_signal_for_which_the_pipe_has_no_room_has_a_deadline_too(pipe):
    dog = watchdog(*pipe)
    fill(pipe[1])
    dog.forward(signal.SIGTERM)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_another_signal_that_is_read_is_no_answer_to_one_that_had_no_room(pipe):
    """A worker that goes on to send signals, and lets the supervisor read them, must not hide a lost SIGTERM."""
    dog = watchdog(*pipe)
    fill(pipe[1])
    dog.forward(signal.SIGTERM)
    assert signal.SIGTERM not in os.read(pipe[0], 1 << 17)
    dog.forward(signal.SIGWINCH)
    os.read(pipe[0], 1)
    assert dog.next_signal(NEVER) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_the_same_signal_sent_again_and_read_is_an_answer(pipe):
    dog = watchdog(*pipe)
    fill(pipe[1])
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process can take another's descriptor")
def test_a_worker_that_makes_the_guard_s_end_wait_for_room_does_not_hold_the_guard():
    read, write = private_pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    fill(write)
    os.set_blocking(write, True)
    ended = []
    guard = threading.Thread(
        target=lambda: ended.extend([dog.forward(signal.SIGTERM), dog._is_supervising()]), daemon=True
    )
    guard.start()
    guard.join(10.0)
    assert ended == [None, True]
    os.close(read)
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
                threading.Timer(1.5, signal.pthread_kill, (guard, signal.SIGUSR2)).start()

    guard = threading.get_ident()
    supervisor = threading.Thread(target=answer)
    supervisor.start()
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


@pytest.fixture
def at(monkeypatch):
    """Sets the guard's clock."""
    now = [1000.0]
    monkeypatch.setattr("cpulaunch.launch.process.watchdog._now", lambda: now[0])
    return lambda seconds: now.__setitem__(0, 1000.0 + seconds)


def test_interrupts_within_half_a_second_are_one(pipe, at):
    """`timeout -s INT` signals its child, then its group."""
    dog = Watchdog(pipe[1], unread=pipe[0], ending=frozenset({signal.SIGINT}), grace_seconds=9.0)
    seen = []
    for seconds in (0.0, 0.0, 0.1, 0.4, 0.6, 0.7):
        at(seconds)
        dog.forward(signal.SIGINT)
        dog.forward(signal.SIGWINCH)
        seen.append(os.read(pipe[0], 9).count(signal.SIGINT))
    assert seen == [1, 0, 0, 0, 1, 1]


def test_only_a_second_interrupt_brings_the_deadline_near(pipe, at):
    ending = frozenset({signal.SIGTERM, signal.SIGINT})
    dog = Watchdog(pipe[1], unread=pipe[0], ending=ending, grace_seconds=9.0)
    dog.forward(signal.SIGTERM)
    dog.forward(signal.SIGINT)
    others = SimpleNamespace(next_signal=lambda seconds: signal.SIGWINCH)
    at(2.0)
    assert dog.next_signal(others) == signal.SIGWINCH
    dog.forward(signal.SIGINT)
    at(4.0)
    assert dog.next_signal(others) is None
    assert dog.exit_code == 128 + signal.SIGTERM


def test_where_the_end_of_the_workers_is_not_known_reports_have_no_deadline(monkeypatch):
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.REPORT_SECONDS", 0.1)
    read, write = os.pipe()
    dog = Watchdog(write, unread=read, ending=frozenset({signal.SIGTERM}), grace_seconds=0.0, asks=True)
    dog.forward(signal.SIGTERM)
    os.read(read, 9)
    threading.Timer(1.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    assert dog.next_signal(NEVER) == signal.SIGUSR2


INNER, SUPERVISOR, WORKER = 10, 20, 30


@pytest.fixture
def proc(tmp_path):
    """The /proc of a launch, in which a function sets the state of its worker."""
    (tmp_path / "self").symlink_to(str(os.getpid()))
    for parent, child in ((INNER, SUPERVISOR), (SUPERVISOR, WORKER)):
        (tmp_path / f"{parent}/task/{parent}").mkdir(parents=True)
        (tmp_path / f"{parent}/task/{parent}/children").write_text(f"{child} ")
    (tmp_path / str(WORKER)).mkdir()

    def worker(state="Z", group=WORKER, threads=1, status=3 << 8, tracer=0):
        fields = [state, SUPERVISOR, group, *[0] * 14, threads, *[0] * 31, status]
        (tmp_path / f"{WORKER}/stat").write_text(f"{WORKER} (x) y) {' '.join(map(str, fields))}\n")
        (tmp_path / f"{WORKER}/status").write_text(f"Name:\tx\nTracerPid:\t{tracer}\nUid:\t0\n")

    return tmp_path, worker


def looks(folder, number, *, grace_seconds=1.0):
    watch = FailureWatch(INNER, guards=1, grace_seconds=grace_seconds, proc=str(folder))
    return [watch.failure() for _ in range(number)]


@pytest.mark.parametrize(("status", "code"), [(3 << 8, 3), (9, -9)])
def test_a_failure_that_is_not_noticed_is_one_after_the_grace_period(proc, status, code):
    folder, worker = proc
    worker(status=status)
    assert looks(folder, 4) == [None, None, code, code]
    assert looks(folder, 6, grace_seconds=18.0) == [None, None, None, None, None, code]


@pytest.mark.parametrize(
    "state",
    [
        {"state": "S"},
        {"status": 0},
        {"status": 1 << 80},
        {"tracer": 77},
        {"threads": 2},
    ],
    ids=str,
)
def test_what_is_no_failure_of_a_worker_is_never_one(proc, state):
    folder, worker = proc
    worker(**state)
    assert looks(folder, 6) == [None] * 6


def test_a_worker_that_its_parent_traces_fails_like_others(proc):
    """Each worker may ask for that (PTRACE_TRACEME), and the supervisor can reap it all the same."""
    folder, worker = proc
    worker(tracer=SUPERVISOR)
    assert looks(folder, 4) == [None, None, 3, 3]


def test_a_worker_that_joins_another_group_fails_like_others(proc):
    folder, worker = proc
    worker(group=31)
    assert looks(folder, 4) == [None, None, 3, 3]


def test_a_failure_is_missed_only_while_it_is_seen_again_and_again(proc):
    folder, worker = proc
    watch = FailureWatch(INNER, guards=1, grace_seconds=1.0, proc=str(folder))
    for _ in range(3):
        worker()
        assert [watch.failure(), watch.failure()] == [None, None]
        worker(state="S")
        assert watch.failure() is None


@pytest.mark.parametrize(
    ("state", "frozen", "of_launchers", "group", "code"),
    [
        ("t", False, True, WORKER, 3),
        ("S", True, True, WORKER, 3),
        ("S", False, True, WORKER, None),
        ("t", False, False, WORKER, None),
        ("t", False, True, SUPERVISOR + 500, None),  # A process of the agent's own: each rank leads a session.
    ],
)
def test_the_failure_of_a_rank_is_missed_while_its_launcher_is_held(
    proc, monkeypatch, state, frozen, of_launchers, group, code
):
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.is_frozen", lambda pid, proc: frozen)
    folder, worker = proc
    worker(group=group)
    agent = SUPERVISOR + 500
    for parent, child in ((SUPERVISOR, agent), (agent, WORKER)):
        (folder / f"{parent}/task/{parent}").mkdir(parents=True, exist_ok=True)
        (folder / f"{parent}/task/{parent}/children").write_text(f"{child} ")
    (folder / f"{agent}/stat").write_text(f"{agent} (x) {state} {SUPERVISOR} {agent} {'0 ' * 14} 1")
    watch = FailureWatch(INNER, guards=1, grace_seconds=1.0, of_launchers=of_launchers, proc=str(folder))
    assert [watch.failure() for _ in range(4)] == [None, None, code, code]


def test_an_end_that_a_traced_thread_hides_is_missed_while_the_supervisor_reads_nothing(proc):
    folder, worker = proc
    worker(threads=2)
    for thread in (WORKER, WORKER + 1):
        (folder / f"{WORKER}/task/{thread}").mkdir(parents=True)
        (folder / f"{WORKER}/task/{thread}/stat").write_text(f"{thread} (x) Z 1")
    watch = FailureWatch(INNER, guards=1, grace_seconds=1.0, proc=str(folder))
    assert [watch.failure() for _ in range(4)] == [None] * 4
    assert watch.sees_hidden_end
    assert [watch.failure(answers=False) for _ in range(3)] == [None, None, 3]


@pytest.mark.parametrize(("state", "codes"), [("Z", [None, -9, -9]), ("S", [None] * 3)])
def test_the_end_of_a_supervisor_that_its_guard_does_not_see_is_missed(proc, state, codes):
    for path in (proc[0] / str(SUPERVISOR), proc[0] / f"{SUPERVISOR}/task/{SUPERVISOR}"):
        (path / "stat").write_text(f"{SUPERVISOR} (x) {state} {'0 ' * 48}9\n")
    watch = FailureWatch(INNER, guards=1, grace_seconds=1.0, reaps=False, proc=str(proc[0]))
    assert [watch.missed_end() for _ in range(3)] == codes


HIDING = """
import ctypes, os, sys, time
from cpulaunch.launch.process.watchdog import FailureWatch
DUMPABLE = 4  # Source: linux/prctl.h, PR_SET_DUMPABLE.
prctl = ctypes.CDLL(None).prctl
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    prctl(DUMPABLE, 1, 0, 0, 0)
read, write = os.pipe()
inner = os.fork()
if not inner:
    if not os.fork():
        worker = os.fork()
        if not worker:
            prctl(DUMPABLE, int(sys.argv[1]), 0, 0, 0)
            os._exit(3)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        os.write(write, b"x")
    time.sleep(60)
os.read(read, 1)
watch = FailureWatch(inner, guards=1, grace_seconds=1.0)
print([watch.failure() for _ in range(3)])
os.killpg(0, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_DUMPABLE")
@pytest.mark.parametrize("dumpable", [True, False])
def test_the_failure_of_a_worker_that_hides_its_exit_code_from_its_user_is_missed(dumpable):
    command = [sys.executable, "-u", "-c", HIDING, str(int(dumpable))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60, start_new_session=True)
    codes = ("[None, None, 3]", "[None, None, -9]")[: 1 if dumpable else 2]  # Not every kernel hides it.
    assert done.stdout.strip() in codes


@pytest.mark.parametrize("missing", ["self", f"{INNER}/task/{INNER}/children", f"{WORKER}/stat"])
def test_without_proc_no_failure_is_seen(proc, missing):
    folder, worker = proc
    worker()
    (folder / missing).unlink()
    assert looks(folder, 4) == [None] * 4


def test_a_missed_failure_is_the_end_of_the_launch(pipe, proc, monkeypatch):
    monkeypatch.setattr("cpulaunch.launch.process.watchdog.CHECK_SECONDS", 0.1)
    folder, worker = proc
    worker()
    read, write = pipe
    failures = FailureWatch(INNER, guards=1, grace_seconds=0.0, proc=str(folder))
    dog = Watchdog(write, unread=read, ending=frozenset(), grace_seconds=0.0, failures=failures)
    assert [dog.next_signal(NEVER), dog.next_signal(NEVER)] == [None, None]
    assert dog.exit_code == 3
    assert dog.complaint == "the supervisor did not notice that a worker failed (exit code 3); all workers were killed"
