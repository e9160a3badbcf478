"""A launch ends although something that it writes to or waits for is blocked for ever."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from cpulaunch.system.control_group import choose_cgroup, make_cgroup, remove_cgroup
from tests.launch.launching import Launcher, alive, eventually, python
from tests.launch.process.killing import HIDE_CGROUPS
from tests.launch.process.test_hostile_workers import GRACE, SAYING, may_trace

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

SLACK_SECONDS = 20.0
"""For a busy machine; a launch that hangs does so for minutes."""

FAILING = "import os, sys; os.mkdir('failing'); sys.exit(3)"


@pytest.fixture
def started(tmp_path):
    """Starts the command on a program, with a full stderr that is not read, and ends what is left."""
    processes = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(1 << 20))
    os.set_blocking(writer, True)

    def start(code, *options):
        (tmp_path / "job.py").write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "cpulaunch", "--grace", "1", "--show", "none", "--log-dir", "logs", *options]
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        nothing = subprocess.DEVNULL
        process = subprocess.Popen([*command, "job.py"], cwd=tmp_path, env=environ, stdin=nothing, stderr=writer)
        processes.append(process)
        return process

    yield start
    os.close(reader)
    os.close(writer)
    for process in processes:
        process.kill()
        process.wait()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


GUARD_HELD = """
    import ctypes, os, signal, sys
    from cpulaunch.launch.process import watchdog
    from cpulaunch.launch.process.guard import fork_supervisor
    watchdog.CHECK_SECONDS = 0.1
    fork_supervisor(print, workers=1, grace_seconds=0.0, asks=sys.argv[1] == "launch")
    guard, (told, tell) = os.getppid(), os.pipe()
    if os.fork() == 0:
        os.setsid()
        for request in (0x4206, 0x4207):  # Source: linux/ptrace.h, PTRACE_SEIZE and PTRACE_INTERRUPT.
            assert ctypes.CDLL(None).ptrace(request, guard, 0, 0) == 0
        os.write(tell, b"%d" % os.getpid())
        signal.pause()
    print(os.read(told, 20).decode(), flush=True)
    exec(sys.argv[2])
"""


@pytest.mark.parametrize("kind", ["launch", "measurement"])
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os._exit(3)", 3)])
def test_the_end_of_a_supervisor_is_noticed_whose_guard_a_process_holds(kind, end, code):
    if not may_trace():
        pytest.skip("may not trace its parent")
    command = python(GUARD_HELD, kind, end)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    tracer, complaint = done.stdout.splitlines()
    assert complaint == "a guard that is held did not notice the end of the supervisor; all workers were killed"
    assert done.returncode == code
    assert not alive(int(tracer))


def test_a_signal_ends_a_launch_whose_messages_are_not_read(started, tmp_path):
    launch = started(FAILING)
    eventually((tmp_path / "failing").exists, "the worker")
    with pytest.raises(subprocess.TimeoutExpired):  # The supervisor has to say which worker failed.
        launch.wait(timeout=2)
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(timeout=SLACK_SECONDS) == 128 + signal.SIGTERM


TWICE = """
    import os, signal, sys, time
    def stop(*_):
        if os.path.exists("ending"):
            os._exit(0)
        open("ending", "w").close()
    if os.environ["CPULAUNCH_INSTANCE"] == "0":
        while not os.path.exists("ready"):
            time.sleep(0.01)
        sys.exit(3)
    signal.signal(signal.SIGTERM, stop)
    open("ready", "w").close()
    while True:
        signal.pause()
"""


def test_a_signal_after_a_failure_ends_a_launch_whose_messages_are_not_read(started, tmp_path):
    launch = started(TWICE, "--instances", "2", "--grace", "20", "--report", "report.json")
    eventually((tmp_path / "ending").exists, "the end of the other worker")
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(timeout=SLACK_SECONDS) == 3


def test_nothing_is_left_of_a_killed_launch_whose_messages_are_not_read(started, tmp_path):
    launch = started(FAILING)
    eventually((tmp_path / "failing").exists, "the worker")
    (inner,) = children(launch.pid)
    (supervisor,) = children(inner)
    eventually(lambda: not children(supervisor), "the end of the worker")
    launch.kill()
    eventually(lambda: not any(map(alive, (inner, supervisor))), "the end of all")


TRACING = """
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    supervisor = os.getppid()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        assert libc.ptrace(0x4206, supervisor, None, None) == 0  # PTRACE_SEIZE
        assert libc.ptrace(0x4207, supervisor, None, None) == 0  # PTRACE_INTERRUPT
        say("daemon")
        os.write(write, b"1")
        time.sleep(600)
    os.read(read, 1)
    sys.exit(3)
"""
FREEZING = """
    with open("/proc/self/cgroup") as file:
        own = next(line[3:].strip() for line in file if line.startswith("0::"))
    mount = next(each for each in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if os.path.exists(each + own))
    assert "cpulaunch-" in own
    if os.fork() == 0:
        say("daemon")
        time.sleep(600)
    def put(name, text):
        with open(mount + name, "w") as file:
            file.write(text)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    put(os.path.dirname(own).rstrip("/") + "/cgroup.procs", "0")
    put(own + "/cgroup.freeze", "1")
    sys.exit(3)
"""


def may_freeze():
    path = choose_cgroup()
    lock = None if path is None else make_cgroup(path)
    if lock is None:
        return False
    remove_cgroup(path)
    os.close(lock)
    return True


BLOCKS = ("trace", "trace without a cgroup", "freeze")


@pytest.fixture(scope="module")
def blocked(tmp_path_factory):
    """A function that gives a launch of each of BLOCKS, None without rights: begun at once, as they mostly wait."""
    launcher = Launcher(tmp_path_factory.mktemp("blocked"))
    other = python("import signal; signal.pause()")
    started = {}
    for number, block in enumerate(BLOCKS):
        if may_freeze() if block == "freeze" else may_trace():
            prefix = HIDE_CGROUPS if block == "trace without a cgroup" and os.geteuid() == 0 else ()
            code = (SAYING + (FREEZING if block == "freeze" else TRACING)).replace("daemon", f"daemon-{number}")
            process = launcher.start(python(code), other, prefix=prefix, grace_seconds=GRACE, show=[])
            started[block] = process, launcher.pid(f"daemon-{number}")
    yield started.get
    launcher.end()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_failure_ends_a_launch_whose_supervisor_is_blocked(blocked, block):
    """No signal has to come: the guard sees that the failed worker is not reaped."""
    if blocked(block) is None:
        pytest.skip("needs rights")
    process, daemon = blocked(block)
    assert process.wait(timeout=10 + GRACE + 5 + SLACK_SECONDS) == 3
    assert b"did not notice that a worker failed (exit code 3)" in process.stderr.read()
    assert not alive(daemon)
