"""A command's output, which it and processes from outside can open as this process does."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from cpulaunch.launch.process.processes import is_child, own_children
from cpulaunch.measure.child_process import ChildSetup, run_child
from cpulaunch.records.errors import LaunchError
from cpulaunch.system.libc import is_linux
from tests.launch.launching import alive, eventually, python
from tests.launch.process.test_hostile_workers import may_trace
from tests.strangers import UID, needs_root

pytestmark = pytest.mark.skipif(not is_linux(), reason="pipes can be opened through /proc on Linux alone")

SETUP = ChildSetup(environ=dict(os.environ))
LIMIT_SECONDS, LONGER_SECONDS = 4, 15
TALK = f"""
readlink /proc/$$/fd/1 /proc/$$/fd/2
read _ <"$1"
echo more
echo more >&2
sleep {LONGER_SECONDS}
touch "$2"
"""


def test_what_another_process_writes_to_the_output_on_and_on_does_not_hold_the_end():
    """Here the test itself does, each time that something was read."""
    end, opened = time.monotonic() + 30, []

    def write_on(data):
        if not opened:
            opened.append(open_pipe(data.decode().strip(), os.O_WRONLY))
        if time.monotonic() < end:
            os.write(opened[0], b"x")

    found = run_child(["readlink", "/proc/self/fd/1"], SETUP, limit_seconds=60, receive=[write_on] * 2)
    os.close(opened[0])
    assert found.exit_code == 0
    assert time.monotonic() < end


def open_pipe(name, flags):
    """Another descriptor of the pipe of this process with the name that a link to it shows."""
    numbers = os.listdir("/proc/self/fd")  # Not readlink below: the folder's own descriptor is gone.
    paths = (f"/proc/self/fd/{number}" for number in numbers)
    return os.open(next(path for path in paths if os.path.basename(os.path.realpath(path)) == name), flags)


def test_output_that_another_process_reads_first_does_not_hold_up_the_time_limit(tmp_path):
    """Here the test itself does: both pipes are ready, and while one of them is read, it reads the other."""
    go, outlived = tmp_path / "go", tmp_path / "outlived"
    os.mkfifo(go)
    names, pipes, taken = [], [], []

    def receive(number, data):
        if pipes and not taken:
            taken.append(os.read(pipes[1 - number], 100))
        names.extend(data.split())
        if len(names) == 2:
            pipes.extend(open_pipe(name.decode(), os.O_RDONLY) for name in names)
            go.write_text("\n")
            for pipe in pipes:
                select.select([pipe], [], [])

    command, receivers = ["sh", "-c", TALK, "sh", str(go), str(outlived)], [partial(receive, 0), partial(receive, 1)]
    found = run_child(command, SETUP, limit_seconds=LIMIT_SECONDS, receive=receivers)
    for pipe in pipes:
        os.close(pipe)
    assert (found.exit_code, taken) == (None, [b"more\n"])
    assert not outlived.exists()


ADOPTING = """
    import os
    from cpulaunch.launch.process import watchdog
    from cpulaunch.launch.process.guard import fork_supervisor
    from cpulaunch.measure.child_process import ChildSetup, run_child
    watchdog.CHECK_SECONDS = 0.1
    link = fork_supervisor(print, workers=1, grace_seconds=0.0)
    setup = ChildSetup(environ=dict(os.environ), inherited=link.inherited, control=link.control)
    found = run_child(["sh", "-c", "(setsid false &) ; sleep 3; exit 4"], setup, limit_seconds=60)
    print(found.exit_code)
"""


def test_an_orphan_that_has_failed_does_not_end_a_measurement():
    """It leads a group, as a worker does, and is reaped at the end."""
    done = subprocess.run(python(ADOPTING), capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("4\n", "", 0)


OPEN_PIPES = """
import os, select, signal, sys
folder, ends = f"/proc/{os.getppid()}/fd", []
for name in os.listdir(folder):
    try:
        pipe = os.readlink(f"{folder}/{name}")
        if pipe.startswith("pipe:") and pipe not in sys.argv:
            ends.append(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        continue
"""
WRITE = "[os.write(end, b'x') for end in ends]; select.select([], [], [], 0.5)"
HOLD = "os.fork() or (os.setsid(), signal.pause())"


@pytest.mark.parametrize("use", [WRITE, HOLD], ids=["writes", "keeps"])
def test_a_command_that_opens_the_pipes_of_its_measurement_has_its_own_end(use):
    code = f"{OPEN_PIPES}\n{use}\nsys.exit(3)"
    found = run_child([sys.executable, "-c", code, *pipes_of_this_process()], SETUP, limit_seconds=LIMIT_SECONDS)
    assert found.exit_code == 3


def pipes_of_this_process():
    """Those of others, such as pytest's own, are to stay as they are."""
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [os.readlink(path) for path in paths if os.path.lexists(path)]


def test_the_number_of_a_command_is_kept_while_it_is_signalled(monkeypatch):
    """It may end while it is paused."""
    control, arrivals = os.pipe()
    signalled, threads = [], set(threading.enumerate())

    def signal_group(pid, number):
        signalled.append((number, is_child(pid)))
        if number == signal.SIGTSTP:
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not alive(pid), "the end of the command")
            eventually(lambda: threads.issuperset(threading.enumerate()), "the end of the thread that waits for it")
            os.write(arrivals, bytes([signal.SIGCONT]))

    monkeypatch.setattr("cpulaunch.measure.child_process.signal_group", signal_group)
    os.write(arrivals, bytes([signal.SIGTSTP]))
    found = run_child(["sleep", "60"], ChildSetup(environ=dict(os.environ), control=control), limit_seconds=60)
    os.close(control)
    os.close(arrivals)
    assert signalled == [(signal.SIGTSTP, True), (signal.SIGCONT, True)]
    assert found.exit_code == -signal.SIGKILL


ENDS_WHEN_TOLD = """
import os, signal, sys, time
def end(*_):
    open("asked", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    open("saved", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, end)
open("started", "w").close()
while True:
    signal.pause()
"""


def test_the_first_ctrl_c_does_not_kill_a_command_that_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    control, arrivals = os.pipe()

    def interrupt():
        for name, number in (("started", signal.SIGTERM), ("asked", signal.SIGINT)):
            eventually((tmp_path / name).exists, name)
            os.write(arrivals, bytes([number]))
        eventually(lambda: not select.select([control], [], [], 0)[0], "the receipt of Ctrl-C")
        (tmp_path / "go").touch()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_child(python(ENDS_WHEN_TOLD), ChildSetup(environ=dict(os.environ), control=control), limit_seconds=60)
    thread.join()
    os.close(control)
    os.close(arrivals)
    assert (tmp_path / "saved").exists()


THREAD_TRACED = """
import ctypes, os, signal, threading, time
thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
thread.start()
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    assert ctypes.CDLL(None).ptrace(0x4206, thread.native_id, 0, 0) == 0  # PTRACE_SEIZE
    os.write(write, b"1")
    signal.pause()
os.read(read, 1)
os._exit(3)
"""


def test_the_end_of_a_command_is_seen_while_a_thread_of_it_is_traced(monkeypatch):
    if not may_trace():
        pytest.skip("may not trace its parent")
    monkeypatch.setattr("cpulaunch.launch.process.child_watch.CHECK_SECONDS", 0.1)
    assert run_child(python(THREAD_TRACED), SETUP, limit_seconds=10).exit_code == 3


OF_ANOTHER_USER = f"""
    import os
    from cpulaunch.measure import child_process
    child_process.GRACE_SECONDS = child_process.REMAINS_SECONDS = 0.1
    def become_other_user():
        os.setresuid({UID}, {UID}, {UID})
        return True
    setup = child_process.ChildSetup(environ=dict(os.environ))
    command = ["sh", "-c", "echo $$; exec sleep 600 >&- 2>&-"]
    found = child_process.run_child(command, setup, limit_seconds=60, enough=become_other_user)
    print(found.exit_code, found.stdout_tail.decode())
"""


@needs_root
def test_a_command_that_may_not_be_signalled_is_left():
    """As a setuid program: here it is not the command but what measures it that becomes another user."""
    done = subprocess.run(python(OF_ANOTHER_USER), capture_output=True, text=True, timeout=30, check=True)
    code, pid = done.stdout.split()
    os.kill(int(pid), signal.SIGKILL)
    assert code == "None"


IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("started", "w").close()
signal.pause()
"""


@pytest.mark.parametrize("answer", [True, LaunchError("nothing can be read")], ids=["slow", "error"])
def test_the_files_of_a_launch_that_does_not_end_in_time_are_removed(tmp_path, monkeypatch, answer):
    """The launch gives its worker longer than the measurement waits."""
    monkeypatch.setattr("cpulaunch.measure.child_process.GRACE_SECONDS", 0.2)
    runs, started = tmp_path / "runs", tmp_path / "started"
    runs.mkdir()

    def enough():
        if started.exists() and isinstance(answer, LaunchError):
            raise answer
        return started.exists()

    launch = [sys.executable, "-P", "-m", "cpulaunch", "run", "--report", str(tmp_path / "report"), "--no-python"]
    command = [*launch, sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{IGNORES_SIGTERM}"]
    setup = ChildSetup(environ={**os.environ, "TMPDIR": str(runs)})
    with contextlib.suppress(LaunchError):
        run_child(command, setup, limit_seconds=120, enough=enough, guarded=True)
    assert list(runs.iterdir()) == []


def test_no_thread_for_a_command_is_an_error_as_no_process_is_and_leaves_none(monkeypatch):
    before = own_children()
    fewest_threads(monkeypatch, 0)
    with pytest.raises(LaunchError, match="cannot create a process"):
        run_child(["sleep", "600"], SETUP, limit_seconds=60)
    assert own_children() == before


def test_what_a_killed_launch_left_can_still_end_without_another_thread(tmp_path, monkeypatch):
    fewest_threads(monkeypatch, 1)
    remover = f"(sleep 0.3; touch {tmp_path / 'removed'}) & kill -9 $$"
    found = run_child(["sh", "-c", remover], SETUP, limit_seconds=60, guarded=True)
    assert found.exit_code == -signal.SIGKILL
    assert (tmp_path / "removed").exists()


def fewest_threads(monkeypatch, count):
    """Effect: so many more threads can be started, as at the limit on processes."""
    start, left = threading.Thread.start, [None] * count

    def limited(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
