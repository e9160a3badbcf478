"""Ends and signals that a process hides from the launch: by tracing, by taking or holding what is in its pipes.

And a stranger's process, which the launch must leave alone although the kernel could hand it over.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.launching import alive, eventually, python
from tests.launch.process.killing import HIDE_CGROUPS
from tests.launch.process.test_hostile_workers import GRACE, HELD_AT_EXIT, SAYING, SEIZED, SLACK_SECONDS, may_trace

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
SLEEPER = python("import time; time.sleep(600)")


@pytest.fixture(params=["with cgroups", "without cgroups"])
def prefix(request):
    """The start of a command line; for others than root no test gives a launch a cgroup."""
    if request.param == "without cgroups" and os.geteuid() != 0:
        pytest.skip("only root can hide its cgroups")
    return HIDE_CGROUPS if request.param == "without cgroups" else ()


@pytest.fixture
def tracing():
    if not may_trace():
        pytest.skip("may not trace its parent")


TRACED_BY_DAEMON = """
    worker = os.getpid()
    if os.fork() == 0:
        os.setsid()
        assert ctypes.CDLL(None).ptrace(0x4206, worker, 0, 0) == 0
        say("tracer")
        time.sleep(600)
    while not os.path.exists("tracer"):
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(worker, signal.SIGKILL)", 137), ("sys.exit(0)", 0)]
)
def test_the_end_of_a_worker_is_seen_while_its_own_daemon_traces_it(launcher, prefix, tracing, end, code):
    worker = python(f"{SAYING}{TRACED_BY_DAEMON}    {end}\n")
    others = [] if code == 0 else [SLEEPER]
    process = launcher.start(worker, *others, prefix=prefix, grace_seconds=GRACE, log_dir="logs")
    assert process.wait(GRACE + SLACK_SECONDS) == code
    assert not alive(launcher.pid("tracer"))


TRACER = """
    import ctypes, sys, time
    assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, int(sys.argv[2])) == 0
    print("traces", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "options"), [(None, SEIZED), (signal.SIGTERM, SEIZED), (signal.SIGTERM, HELD_AT_EXIT)]
)
def test_a_launch_ends_whose_worker_a_stopped_debugger_holds(launcher, tracing, number, options):
    """It is no process of the launch, and is left alone."""
    ending = "say('ready')\n    while not os.path.exists('go'):\n        time.sleep(0.01)\n"
    process = launcher.start(python(f"{SAYING}    {ending}"), grace_seconds=GRACE, log_dir="logs")
    command = python(TRACER, str(launcher.pid("ready")), str(options))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout.readline() == b"traces\n"
            if number is None:
                (launcher.dir / "go").touch()
            else:
                process.send_signal(number)
            assert process.wait(GRACE + SLACK_SECONDS) == (0 if number is None else 128 + number)
            assert tracer.poll() is None
        finally:
            tracer.kill()


PIPES = """
    import stat
    def pipes():
        supervisor = os.getppid()
        for pid in (supervisor, parent(supervisor), parent(parent(supervisor))):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                try:
                    if stat.S_ISFIFO(os.stat(path).st_mode):
                        yield path
                except OSError:
                    continue
    def opened(flags):
        found = []
        for path in pipes():
            try:
                found.append(os.open(path, flags | os.O_NONBLOCK))
            except OSError:
                continue
        return found
"""
WRITES = """
    for fd in opened(os.O_WRONLY):
        os.write(fd, bytes(range(1, 256)))
    say("ready")
    time.sleep(600)
"""
READS = """
    fds = opened(os.O_RDONLY)
    say("ready")
    while True:
        for fd in fds:
            try:
                os.read(fd, 4096)
            except OSError:
                continue
"""


@pytest.mark.parametrize("attack", [WRITES, READS], ids=["writes", "reads"])
def test_a_worker_that_uses_the_pipes_of_the_launch_cannot_change_its_end(launcher, attack):
    process = launcher.start(python(SAYING + PIPES + attack), SLEEPER, grace_seconds=GRACE, log_dir="logs")
    worker = launcher.pid("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE + SLACK_SECONDS) == 128 + signal.SIGTERM
    assert not alive(worker)


def test_a_failure_is_seen_while_another_worker_reads_the_pipes_of_the_launch(launcher):
    failing = python(f"{SAYING}    while not os.path.exists('ready'):\n        time.sleep(0.01)\n    sys.exit(3)")
    process = launcher.start(python(SAYING + PIPES + READS), failing, grace_seconds=GRACE, log_dir="logs")
    assert process.wait(GRACE + SLACK_SECONDS) == 3


def test_the_end_of_the_guard_is_seen_while_a_worker_holds_the_pipes_of_the_launch(launcher, prefix):
    process = launcher.start(python(SAYING + PIPES + WRITES), prefix=prefix, grace_seconds=GRACE, log_dir="logs")
    worker = launcher.pid("ready")
    process.kill()
    eventually(lambda: not alive(worker), "the end of the worker")


def test_nothing_is_left_of_a_killed_guard_whose_supervisor_is_traced(launcher, tracing):
    """The supervisor, which would end everything, does not run; the inner guard gives it some seconds."""
    trace = "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0; say('ready'); time.sleep(600)"
    process = launcher.start(python(f"{SAYING}    {trace}"), grace_seconds=GRACE, log_dir="logs")
    worker = launcher.pid("ready")
    process.kill()
    eventually(lambda: not alive(worker), "the end of the worker")


WITH_LIMIT = """
    import resource
    limit = getattr(resource, f"RLIMIT_{sys.argv[1]}")
    if os.fork() == 0:
        for _ in range(3):
            os.setsid()
            if os.fork():
                time.sleep(600)
        say("daemon")
        time.sleep(600)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    supervisor = os.getppid()
    for pid in (supervisor, parent(supervisor), parent(parent(supervisor))):
        resource.prlimit(pid, limit, (0, 0))
"""


@pytest.mark.parametrize("limit", ["NOFILE", "AS", "DATA"])
@pytest.mark.parametrize(
    ("end", "codes"),
    [("os.kill(supervisor, signal.SIGKILL)", (128 + signal.SIGKILL,)), ("sys.exit(3)", (1, 3, 125))],
    ids=["supervisor killed", "worker failed"],
)
def test_a_launch_whose_descriptors_or_memory_a_worker_limits_leaves_no_process(launcher, prefix, limit, end, codes):
    """Any process may set the limits of others of its user, by which a launcher may fail. Source: prlimit(2)."""
    worker = python(f"{SAYING}{WITH_LIMIT}    {end}\n", limit)
    process = launcher.start(worker, SLEEPER, prefix=prefix, grace_seconds=GRACE)
    assert process.wait(GRACE + SLACK_SECONDS) in codes
    assert not alive(launcher.pid("daemon"))


STRANGER = """
    while not os.path.exists("ready"):
        time.sleep(0.01)
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say("stranger")
        time.sleep(600)
"""
WITH_STRANGER = ("sh", "-c", '"$PYTHON" -c "$STRANGER" & exec "$@"', "sh")
DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        say("daemon")
        time.sleep(600)
    os.wait()
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    say("ready")
    while not os.path.exists("stranger"):
        time.sleep(0.01)
    supervisor = os.getppid()
"""
ENDS = {
    "the supervisor is killed": ("os.kill(supervisor, signal.SIGKILL)", 128 + signal.SIGKILL),
    "both are killed": (
        "for pid in (parent(supervisor), supervisor): os.kill(pid, signal.SIGKILL)",
        128 + signal.SIGKILL,
    ),
    "the supervisor is traced": (
        "assert ctypes.CDLL(None).ptrace(16, supervisor, 0, 0) == 0; say('traced')",
        128 + signal.SIGTERM,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_daemon_of_an_earlier_background_job_is_left_alone(launcher, prefix, end):
    """`job & exec cpulaunch`: the job's daemon becomes an orphan below the process that is now the launch's guard."""
    if "traced" in end and not may_trace():
        pytest.skip("may not trace its parent")
    code, status = ENDS[end]
    (_, _, stranger) = python(SAYING + STRANGER)[1:]
    process = launcher.start(
        python(f"{SAYING}{DAEMON}    {code}\n    time.sleep(600)\n"),
        prefix=(*prefix, *WITH_STRANGER),
        env={"PYTHON": python("")[0], "STRANGER": stranger},
        grace_seconds=GRACE,
        log_dir="logs",
    )
    if "traced" in end:
        launcher.pid("traced")
        process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE + SLACK_SECONDS) == status
    worker, daemon, stranger = (launcher.pid(name) for name in ("ready", "daemon", "stranger"))
    try:
        eventually(lambda: not alive(worker) and not alive(daemon), "the end of the worker and its daemon")
        assert alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


THREAD_TRACED_BY_DAEMON = """
    import threading
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        assert ctypes.CDLL(None).ptrace(0x4206, thread.native_id, 0, int(sys.argv[1])) == 0
        say("tracer")
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    os._exit(3)
"""


@pytest.mark.parametrize("options", [SEIZED, HELD_AT_EXIT], ids=["traced", "held at its end"])
def test_the_end_of_a_worker_is_seen_while_a_daemon_traces_a_thread_of_it(launcher, tracing, options):
    """Neither SIGCHLD, waitid(2) nor a pidfd shows it."""
    worker = python(SAYING + THREAD_TRACED_BY_DAEMON, str(options))
    process = launcher.start(worker, SLEEPER, grace_seconds=GRACE, log_dir="logs")
    assert process.wait(GRACE + SLACK_SECONDS) == 3
    assert not alive(launcher.pid("tracer"))


def test_a_signal_ends_a_launch_of_whose_worker_a_stopped_debugger_holds_a_thread(launcher, tracing):
    code = """
    import threading
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    with open("thread", "w") as file:
        file.write(str(thread.native_id))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say("ready")
    while True:
        signal.pause()
    """
    process = launcher.start(python(SAYING + code), grace_seconds=GRACE, log_dir="logs")
    launcher.pid("ready")
    command = python(TRACER, (launcher.dir / "thread").read_text(), str(SEIZED))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout.readline() == b"traces\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(GRACE + SLACK_SECONDS) == 128 + signal.SIGTERM
            assert tracer.poll() is None
        finally:
            tracer.kill()


NAMESPACE, PROGRAM = ("unshare", "--pid", "--fork"), ("sh", "-c", "sleep 600 & wait")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_signal_ends_a_launch_in_whose_pid_namespace_a_stopped_debugger_holds_a_process(
    launcher, tracing, namespaces, depth
):
    """The first process of the namespace waits in its exit for the one that is held."""
    process = launcher.start([*NAMESPACE * depth, *PROGRAM], grace_seconds=GRACE, log_dir="logs")
    member = eventually(lambda: sleeping_below(process.pid), "the member of the namespace")
    with subprocess.Popen(python(TRACER, str(member), str(SEIZED)), stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout.readline() == b"traces\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(GRACE + SLACK_SECONDS) == 128 + signal.SIGTERM
        finally:
            tracer.kill()


def sleeping_below(pid):
    """The pid of the only descendant that runs `sleep`; None if there is none yet."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = children[0]
    return int(pid) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n" else None
