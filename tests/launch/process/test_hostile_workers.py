"""A worker that works against its supervisor ends within the grace period and one second, and so does what it left."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.launching import alive, eventually, interrupt_again, python, refusing
from tests.launch.process.killing import HIDE_CGROUPS, chain
from tests.strangers import UID, needs_root

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

GRACE = 1.0
SLACK_SECONDS = 30.0
"""One second is promised; a machine that is busy with other tests takes longer, and a launch that hangs for minutes."""

SAYING = """
    import ctypes, os, signal, sys, time
    def say(name):
        with open(name + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(name + ".new", name)
    def parent(pid):
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
"""
HOSTILE = {
    "joins the supervisor's group": "os.setpgid(0, os.getpgid(os.getppid()))",
    "joins its child's group": """
    child = os.fork()
    if child == 0:
        time.sleep(600)
    os.setpgid(child, child)
    os.setpgid(0, child)
    """,
    "stops the supervisor": "os.kill(os.getppid(), signal.SIGSTOP)",
    "stops the supervisor again and again": """
    supervisor = os.getppid()
    if os.fork() == 0:
        while True:
            os.kill(supervisor, signal.SIGSTOP)
    """,
    "floods the launch with SIGCHLD": """
    supervisor = os.getppid()
    targets = supervisor, parent(supervisor), parent(parent(supervisor))
    if os.fork() == 0:
        while True:
            for target in targets:
                os.kill(target, signal.SIGCHLD)
    """,
    "stops the inner guard": "os.kill(parent(os.getppid()), signal.SIGSTOP)",
    "traces the supervisor": """
    assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0
    """,
    "stops the inner guard again and again": """
    inner = parent(os.getppid())
    if os.fork() == 0:
        while True:
            os.kill(inner, signal.SIGSTOP)
    """,
    "traces the supervisor once that is to end": """
    def trace(*_):
        assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0
    signal.signal(signal.SIGTERM, trace)
    """,
    "stops itself": "say('ready'); os.kill(os.getpid(), signal.SIGSTOP)",
}


def hostile(code):
    return python(SAYING + "\n    " + code.strip() + "\n    say('ready')\n    time.sleep(600)\n")


@pytest.fixture
def without_cgroups():
    """The start of a command line under which a launch has no cgroup; for others than root no test gives it one."""
    return HIDE_CGROUPS if os.geteuid() == 0 else ()


def may_trace():
    """Whether a process may trace its parent. Source: Linux, Documentation/admin-guide/LSM/Yama.rst."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = int(file.read())
    except OSError:
        scope = 0
    return scope == 0 or (os.geteuid() == 0 and scope < 3)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_worker_ends_within_the_grace_period(launcher, what):
    if "traces" in what and not may_trace():
        pytest.skip("may not trace its parent")
    process = launcher.start(hostile(HOSTILE[what]), python("import time; time.sleep(600)"), grace_seconds=GRACE)
    worker = launcher.pid("ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < GRACE + SLACK_SECONDS
    assert not alive(worker)


ADOPTING = """
    import os, sys
    from cpulaunch.system.libc import adopt_orphans
    adopt_orphans()
    guard = os.fork()
    if guard == 0:
        os.execv(sys.argv[1], sys.argv[1:])
    with open("guard.new", "w") as file:
        file.write(str(guard))
    os.rename("guard.new", "guard")
    try:
        while True:
            os.wait()
    except ChildProcessError:
        print("all ended")
"""


def test_a_stopped_inner_guard_ends_with_the_killed_launcher(launcher):
    """Where a process of the same session adopts it, the kernel does not continue it. Source: setpgid(2), orphaned."""
    process = launcher.start(hostile(""), prefix=python(ADOPTING), grace_seconds=GRACE, log_dir="logs")
    worker, pids = launcher.pid("ready"), chain(launcher.pid("guard"))
    for name in ("guard", "inner"):
        os.kill(pids[name], signal.SIGSTOP)
    os.kill(pids["guard"], signal.SIGKILL)
    assert b"all ended" in process.communicate(timeout=SLACK_SECONDS)[0]
    assert not any(map(alive, [worker, *pids.values()]))


KILLED_BESIDE_STOPPED = """
    inner = parent(os.getppid())
    guards = {"lowest": inner, "middle": parent(inner), "highest": parent(parent(inner))}
    for step in sys.argv[1:]:
        how, _, which = step.partition(" ")
        os.kill(guards[which], signal.SIGSTOP if how == "stop" else signal.SIGKILL)
"""
AFTER_A_JOB = ("sh", "-c", 'true & exec "$@"', "sh")
"""Makes a launch with three guards instead of two, as the first one had a child before."""


@pytest.mark.parametrize(
    ("prefix", "steps"),
    [
        ((), ("stop middle", "kill lowest")),
        ((), ("kill lowest", "stop middle")),
        (AFTER_A_JOB, ("stop highest", "kill middle")),
        (AFTER_A_JOB, ("stop highest", "kill lowest")),
        (AFTER_A_JOB, ("stop middle", "kill lowest")),
    ],
    ids=str,
)
def test_a_guard_that_a_worker_has_stopped_goes_on_though_another_is_killed(launcher, prefix, steps):
    process = launcher.start(python(SAYING + KILLED_BESIDE_STOPPED, *steps), prefix=prefix, log_dir="logs")
    assert process.wait(timeout=SLACK_SECONDS) == 128 + signal.SIGKILL


def test_a_worker_that_left_its_group_ends_with_the_killed_launcher(launcher):
    process = launcher.start(hostile(HOSTILE["joins the supervisor's group"]), grace_seconds=GRACE, log_dir="logs")
    worker = launcher.pid("ready")
    process.kill()
    eventually(lambda: not alive(worker), "the end of the worker")


def test_a_stopped_supervisor_goes_on(launcher):
    process = launcher.start(
        hostile("os.kill(os.getppid(), signal.SIGSTOP); say('ready'); sys.exit(3)"), log_dir="logs"
    )
    assert process.wait() == 3


@pytest.mark.parametrize("how", ["os.kill(guard, signal.SIGSTOP)", "ctypes.CDLL(None).ptrace(16, guard, 0, 0)"])
def test_a_guard_that_was_stopped_ends_with_its_launch(launcher, how):
    """A tracer that ends without a word leaves it stopped. Source: ptrace(2), PTRACE_ATTACH."""
    if "ptrace" in how and not may_trace():
        pytest.skip("may not trace its launcher")
    code = f"guard = parent(parent(os.getppid())); assert not {how}; time.sleep(0.2); sys.exit(3)"
    process = launcher.start(python(SAYING + "    " + code), grace_seconds=GRACE, log_dir="logs")
    assert process.wait(SLACK_SECONDS) == 3


@pytest.mark.root
def test_the_run_directory_is_named_where_it_cannot_be_removed(launcher, namespaces):
    code = """
    folder = os.path.dirname(os.environ["CPULAUNCH_EVENTS"])
    assert os.system(f"mount -t tmpfs none {folder}") == 0
    """
    tmp = launcher.dir / "tmp"
    tmp.mkdir()
    outcome = launcher.run(
        python(SAYING + code), prefix=("unshare", "-m"), env={"TMPDIR": str(tmp)}, report="report.json"
    )
    assert outcome.code == 0, outcome.error
    assert f"warning: cannot remove the files of this run: {tmp}/{os.listdir(tmp)[0]}\n" in outcome.error


def is_pending(number, pid):
    """Whether a signal to the process has not been received yet. Source: proc_pid_status(5), ShdPnd."""
    with open(f"/proc/{pid}/status") as file:
        (pending,) = (int(line.split()[1], 16) for line in file if line.startswith("ShdPnd:"))
    return bool(pending >> (number - 1) & 1)


def test_ctrl_c_twice_ends_a_launch_whose_supervisor_does_not_answer(launcher):
    if not may_trace():
        pytest.skip("may not trace its parent")
    process = launcher.start(hostile(HOSTILE["traces the supervisor"]), grace_seconds=600, log_dir="logs")
    worker = launcher.pid("ready")
    process.send_signal(signal.SIGINT)
    eventually(lambda: not is_pending(signal.SIGINT, process.pid), "the receipt of the first one")
    assert interrupt_again(process) == 128 + signal.SIGINT
    assert not alive(worker)
    assert b"the supervisor did not read signal 2 in time" in process.stderr.read()


@pytest.fixture
def held_program(tmp_path):
    """A program that no process can execute before this one lets go of it, or the kernel loses its patience (45 s)."""
    path = tmp_path / "held"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # Asks to let go of it.
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield str(path)
    except OSError as error:
        pytest.skip(f"no leases here: {error}")
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_a_worker_that_cannot_execute_its_program_yet_delays_no_end(launcher, held_program):
    began = time.monotonic()
    outcome = launcher.run(python("raise SystemExit(3)"), [held_program], grace_seconds=GRACE)
    assert outcome.code == 3, outcome.error
    assert time.monotonic() - began < GRACE + SLACK_SECONDS


def test_a_signal_ends_a_launch_of_which_a_worker_cannot_execute_its_program_yet(launcher, held_program):
    process = launcher.start(hostile(""), [held_program], grace_seconds=GRACE)
    worker = launcher.pid("ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < GRACE + SLACK_SECONDS
    assert not alive(worker)
    assert b"did not read" not in process.stderr.read()


CROWD = """
    for _ in range(int(sys.argv[1])):
        if os.fork() == 0:
            if sys.argv[2] == "sessions":
                os.setsid()
            time.sleep(600)
    say("ready")
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group", "sessions"])
def test_five_thousand_children_end_within_the_grace_period(launcher, kind):
    process = launcher.start([*python(SAYING + CROWD), "5000", kind], grace_seconds=GRACE, log_dir="logs")
    launcher.pid("ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    took = time.monotonic() - began
    print(f"{kind}: {took:.2f} s")
    assert took < GRACE + SLACK_SECONDS


FORKING = """
    while True:  # Each child takes its parent's place: no process that is listed lives when it is killed.
        if os.fork():
            os._exit(0)
        os.setsid()
        say("ready")
        time.sleep(0.002)
"""


def test_a_process_that_forks_and_exits_without_end_is_caught(launcher):
    process = launcher.start(python(SAYING + FORKING), grace_seconds=GRACE, log_dir="logs")
    launcher.pid("ready")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert time.monotonic() - began < GRACE + SLACK_SECONDS
    time.sleep(0.2)
    assert not alive(int((launcher.dir / "ready").read_text()))


WITHOUT_PROC = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
DAEMON = """
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        say("daemon")
        os.write(tell, b".")
        time.sleep(600)
        os._exit(0)
    os.close(tell)
    os.read(told, 1)
"""


@pytest.mark.root
def test_without_proc_a_daemon_is_ended_too(launcher, namespaces):
    process = launcher.start(python(SAYING + DAEMON), prefix=WITHOUT_PROC, grace_seconds=GRACE, log_dir="logs")
    assert process.wait() == 0
    assert not alive(launcher.pid("daemon"))


@pytest.mark.root
def test_without_proc_no_process_is_left_after_the_supervisor_is_killed(launcher, namespaces):
    kill = DAEMON + "    os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)\n"
    process = launcher.start(python(SAYING + kill), prefix=WITHOUT_PROC, grace_seconds=GRACE, log_dir="logs")
    assert process.wait() == 128 + signal.SIGKILL
    assert not alive(launcher.pid("daemon"))


def test_what_cannot_be_promised_is_said(launcher):
    """Where the kernel refuses to hand orphans over, as in some sandboxes, and there is no cgroup either."""
    hidden = HIDE_CGROUPS if os.geteuid() == 0 else ()
    outcome = launcher.run(python("pass"), prefix=(*hidden, *refusing("prctl", code=1)), log_dir="logs")
    assert "processes that leave their worker's process group may outlive this run" in outcome.error


TWO_ORPHANS = """
    def orphan(ignores):
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 1)
                os.dup2(null, 2)
                signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores else signal.SIG_DFL)
                os.write(write, str(os.getpid()).encode())
                time.sleep(600)
            os._exit(0)
        os.wait()
        return int(os.read(read, 20))
    pids = f"{orphan(False)} {orphan(True)}"
    with open("orphans.new", "w") as file:
        file.write(pids)
    os.rename("orphans.new", "orphans")
"""
REUSING = """
import os, subprocess, sys, time
launcher = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not os.path.exists("orphans"):
    time.sleep(0.01)
gentle, stubborn = map(int, open("orphans").read().split())
while os.path.exists(f"/proc/{gentle}"):
    time.sleep(0.005)
for _ in range(200):
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(gentle - 1))
    innocent = subprocess.Popen(["sleep", "600"])
    if innocent.pid == gentle:
        break
    innocent.kill()
    innocent.wait()
launcher.wait()
time.sleep(0.2)
print(innocent.pid == gentle, innocent.poll(), os.path.exists(f"/proc/{stubborn}"))
innocent.kill()
"""


@pytest.mark.root
def test_a_process_that_got_the_pid_of_an_ended_orphan_is_spared(launcher, namespaces):
    own_pids = ("unshare", "-p", "-m", "--fork", "--mount-proc", sys.executable, "-c", REUSING)
    outcome = launcher.run(python(SAYING + TWO_ORPHANS), prefix=own_pids, grace_seconds=2.0, log_dir="logs")
    assert outcome.lines == ["True None False"], outcome.error


@needs_root
def test_a_process_of_another_user_does_not_hold_up_the_end():
    """As an orphan that a setuid program left, which may not be signalled: the launch does not wait for it."""
    code = f"""
    import os, time
    from cpulaunch.launch.process.processes import endable_children, kill_children, own_children
    if os.fork() == 0:
        os.close(1)
        time.sleep(600)
    foreign = own_children()
    os.setgroups([])
    os.setresgid({UID}, {UID}, {UID})
    os.setresuid({UID}, {UID}, {UID})
    own = os.fork()
    if own == 0:
        os.close(1)
        time.sleep(600)
    assert endable_children() == {{own}}
    kill_children()
    assert own_children() == foreign
    print(*foreign)
    """
    done = subprocess.run(python(code), stdout=subprocess.PIPE, timeout=60, check=True)
    foreign = int(done.stdout)
    assert alive(foreign)
    os.kill(foreign, signal.SIGKILL)


def test_a_child_that_a_future_orphan_traces_is_killed():
    """The kernel shows its end once the tracer has ended, and that is a child only after its own parent's end."""
    if not may_trace():
        pytest.skip("may not trace its parent")
    code = """
    import ctypes, os, time
    from cpulaunch.launch.process.processes import kill_children, own_children
    from cpulaunch.system.libc import adopt_orphans
    adopt_orphans()
    read, write = os.pipe()
    traced = os.fork()
    if traced == 0:
        time.sleep(600)
    if os.fork() == 0:
        if os.fork() == 0:
            assert ctypes.CDLL(None).ptrace(16, traced, 0, 0) == 0
            os.write(write, b"x")
        time.sleep(600)
    os.read(read, 1)
    kill_children()
    assert not own_children()
    """
    assert subprocess.run(python(code), timeout=60, check=False).returncode == 0


SHARING = """
    if os.fork() == 0:
        os.setsid()
        open(f"/dev/shm/{os.getpid()}:{os.getuid()}:test", "w").close()
        say("daemon")
        time.sleep(600)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
def test_shared_memory_of_a_killed_orphan_is_removed(launcher, without_cgroups):
    """As of the ranks under torch's agent: they become orphans when it is killed."""
    process = launcher.start(python(SAYING + SHARING), prefix=without_cgroups, grace_seconds=GRACE, log_dir="logs")
    assert process.wait() == 0
    assert not os.path.exists(f"/dev/shm/{launcher.pid('daemon')}:{os.getuid()}:test")


def test_a_child_that_a_stranger_traces_is_not_waited_for():
    """Such as one of a debugger: it gets SIGKILL, and the kernel shows its end to the debugger first."""
    if not may_trace():
        pytest.skip("may not trace its parent")
    launcher = """
    import os, sys, time
    from cpulaunch.launch.process.processes import kill_children, own_children
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print(child, flush=True)
    sys.stdin.readline()
    kill_children()
    print(own_children() == {child}, flush=True)
    """
    code = """
    import ctypes, subprocess, sys
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert ctypes.CDLL(None).ptrace(0x4206, int(process.stdout.readline()), 0, 0) == 0
    process.stdin.write("\\n")
    process.stdin.flush()
    print(process.stdout.readline())
    """
    done = subprocess.run([*python(code), *python(launcher)], stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout.split() == [b"True"]


TRACER = """
    supervisor = os.getppid()
    victims = {"supervisor": supervisor, "inner guard": parent(supervisor), "worker": os.getpid()}
    victims = [victims[name] for name in sys.argv[1].split("+")]
    options = int(sys.argv[2])
    if os.fork() == 0:
        os.setsid()
        for victim in victims:
            assert ctypes.CDLL(None).ptrace(0x4206, victim, 0, options) == 0
        say("tracer")
        while not os.path.exists("go"):
            time.sleep(0.01)
        for victim in victims[: int(sys.argv[3])]:
            os.kill(victim, signal.SIGKILL)
        say("killed")
        time.sleep(600)
    while not os.path.exists("tracer"):
        time.sleep(0.01)
    say("ready")
    time.sleep(600)
"""
SEIZED, HELD_AT_EXIT = 0, 1 << 6
"""Options of PTRACE_SEIZE. Source: ptrace(2), PTRACE_O_TRACEEXIT."""


def start_traced(launcher, victims, *, options=SEIZED, killed=0, prefix=()):
    """A launch whose worker left a daemon that traces these processes and kills so many of them; its tracer's pid."""
    if not may_trace():
        pytest.skip("may not trace its parent")
    worker = python(SAYING + TRACER, victims, str(options), str(killed))
    process = launcher.start(worker, prefix=prefix, grace_seconds=GRACE, log_dir="logs")
    launcher.pid("ready")
    return process, launcher.pid("tracer")


@pytest.mark.parametrize("victims", ["supervisor", "inner guard", "supervisor+inner guard"])
def test_the_end_of_a_killed_process_is_seen_while_another_traces_it(launcher, without_cgroups, victims):
    process, tracer = start_traced(launcher, victims, killed=2, prefix=without_cgroups)
    worker = launcher.pid("ready")
    (launcher.dir / "go").touch()
    assert process.wait(SLACK_SECONDS) == 128 + signal.SIGKILL
    assert not alive(tracer)
    assert not alive(worker)


@pytest.mark.parametrize("victims", ["worker", "supervisor", "inner guard"])
@pytest.mark.parametrize("options", [SEIZED, HELD_AT_EXIT], ids=["traced", "held at its end"])
def test_a_signal_ends_a_launch_of_which_a_daemon_traces_a_process(launcher, without_cgroups, victims, options):
    process, tracer = start_traced(launcher, victims, options=options, killed=1, prefix=without_cgroups)
    if victims != "worker":
        (launcher.dir / "go").touch()
        # The launch may have ended its tracer before that could say that it killed the process.
        eventually(lambda: (launcher.dir / "killed").exists() or not alive(tracer), "a kill by the tracer")
    process.send_signal(signal.SIGTERM)
    process.wait(GRACE + SLACK_SECONDS)
    assert not alive(tracer)
