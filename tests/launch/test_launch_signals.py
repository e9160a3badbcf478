"""Signals reach the workers, and no process outlives the launcher, however it ends."""

import errno
import fcntl
import json
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap

import pytest

from tests.launch.launching import HERE, alive, eventually, interrupt_again, python, refusing, shell, sleeps


def telling(name):
    """A worker that writes its pid to a file and sleeps."""
    return ["/bin/sh", "-c", f"echo $$ > {name}; exec sleep 600"]


FAMILY = """
    import os, subprocess, sys, time
    name = sys.argv[1]
    def child(kind, **options):
        code = f"echo $$ > {name}-{kind}.new; mv {name}-{kind}.new {name}-{kind}; exec sleep 600"
        return subprocess.Popen(["/bin/sh", "-c", code], **options)
    child("plain")
    child("session", start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            child("daemon", start_new_session=True, stdin=subprocess.DEVNULL)
        os._exit(0)
    while not all(os.path.exists(f"{name}-{kind}") for kind in ("plain", "session", "daemon")):
        time.sleep(0.01)
    with open(f"{name}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.new", name)
"""


def family(name, then="time.sleep(600)"):
    """A worker with a child in its group, one in a session of its own, and a daemon."""
    return [*python(FAMILY), name] if not then else [*python(FAMILY + "    " + then + "\n"), name]


def members(launcher, name):
    return [launcher.pid(name), *(launcher.pid(f"{name}-{kind}") for kind in ("plain", "session", "daemon"))]


def nobody_left(pids):
    eventually(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_no_process_is_left_after_an_ending_signal(launcher, number):
    process = launcher.start(family("a"), family("b"))
    pids = members(launcher, "a") + members(launcher, "b")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert not any(alive(pid) for pid in pids)


def test_no_process_is_left_after_the_launcher_is_killed(launcher):
    process = launcher.start(family("a"), family("b"))
    pids = members(launcher, "a") + members(launcher, "b")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    nobody_left(pids)


def test_no_process_is_left_after_the_supervisor_is_killed(launcher):
    process = launcher.start(family("a"), family("b"))
    pids = members(launcher, "a") + members(launcher, "b")
    supervisor = parent(pids[0])
    assert supervisor != process.pid
    os.kill(supervisor, signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_no_process_is_left_after_success(launcher):
    process = launcher.start(family("a", then="sys.exit(0)"), family("b", then="sys.exit(0)"))
    pids = members(launcher, "a") + members(launcher, "b")
    assert process.wait() == 0
    assert not any(alive(pid) for pid in pids)


def test_no_process_is_left_after_a_failure(launcher):
    then = "exec('while not os.path.exists(\\'b\\'): time.sleep(0.01)'); sys.exit(3)"
    process = launcher.start(family("a", then=then), family("b"))
    pids = members(launcher, "a") + members(launcher, "b")
    assert process.wait() == 3
    assert not any(alive(pid) for pid in pids)


def test_processes_left_by_a_worker_end_while_others_run(launcher):
    launcher.start(shell("sleep 600 & echo $! > left; exit 0"), telling("other"))
    left, other = launcher.pid("left"), launcher.pid("other")
    nobody_left([left])
    assert alive(other)


STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
"""


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(launcher):
    process = launcher.start(python(STUBBORN, "a"), python(STUBBORN, "b"), grace_seconds=0.3)
    pids = [launcher.pid("a"), launcher.pid("b")]
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert not any(alive(pid) for pid in pids)


def test_a_worker_may_finish_within_the_grace_period(launcher, tmp_path):
    careful = python("""
        import pathlib, signal, sys, time
        def finish(*_):
            time.sleep(0.5)
            pathlib.Path("saved").write_text("1")
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        pathlib.Path("ready").write_text("1")
        time.sleep(600)
    """)
    process = launcher.start(careful, telling("other"), grace_seconds=60)
    launcher.pid("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert (tmp_path / "saved").exists()


def test_an_orphan_that_ignores_sigterm_is_killed_after_the_grace_period(launcher):
    code = """
        import subprocess, sys, time, os
        subprocess.Popen([sys.executable, "-c", sys.argv[1], "orphan"], start_new_session=True)
        while not os.path.exists("orphan"):
            time.sleep(0.01)
    """
    process = launcher.start(python(code, textwrap.dedent(STUBBORN)), ["/bin/true"], grace_seconds=0.3)
    assert process.wait() == 0
    assert not alive(launcher.pid("orphan"))


def test_an_unreaped_zombie_does_not_delay_the_end(launcher):
    # The orphan leaves the worker's group after it made a child there, and never waits for that child.
    worker = python("""
        import os, pathlib, time
        if os.fork() == 0:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            os.setsid()
            pathlib.Path("orphan.new").write_text(str(os.getpid()))
            os.rename("orphan.new", "orphan")
            time.sleep(600)
        while not os.path.exists("orphan"):
            time.sleep(0.01)
    """)
    outcome = launcher.run(worker, ["/bin/true"], grace_seconds=0.3)
    assert outcome.code == 0
    assert not alive(launcher.pid("orphan"))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the test lacks its system call numbers")
def test_a_sandbox_that_refuses_prctl_still_ends_the_groups(launcher):
    worker = shell("sleep 600 & echo $! > child; echo $$ > pid; wait")
    process = launcher.start(worker, telling("other"), prefix=refusing("prctl", code=errno.EPERM))
    pids = [launcher.pid("pid"), launcher.pid("child"), launcher.pid("other")]
    process.kill()
    nobody_left(pids)


def test_a_grace_period_longer_than_poll_can_wait_is_accepted(launcher):
    outcome = launcher.run(shell("exit 3"), shell("exec sleep 600"), grace_seconds=1e9)
    assert outcome.code == 3


def test_ctrl_c_twice_kills_at_once(launcher):
    ignoring = python("""
        import os, signal, sys, time
        told = lambda *_: open(sys.argv[1] + "-told", "w").write("1")
        signal.signal(signal.SIGINT, told)
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            time.sleep(600)
    """)
    process = launcher.start([*ignoring, "a"], [*ignoring, "b"], grace_seconds=3600)
    pids = [launcher.pid("a"), launcher.pid("b")]
    process.send_signal(signal.SIGINT)
    launcher.pid("a-told"), launcher.pid("b-told")
    assert interrupt_again(process) == 130
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGALRM, signal.SIGRTMIN + 3]
)
def test_other_signals_are_forwarded_and_the_job_continues(launcher, number):
    worker = python(
        """
        import os, signal, sys, time
        number, name = int(sys.argv[1]), sys.argv[2]
        signal.signal(number, lambda *_: sys.exit(open(name + "-told", "w").write("1") - 1))
        open(name, "w").write(str(os.getpid()))
        while True:
            time.sleep(600)
    """,
        str(int(number)),
    )
    process = launcher.start([*worker, "a"], [*worker, "b"])
    launcher.pid("a"), launcher.pid("b")
    process.send_signal(number)
    assert process.wait() == 0
    assert launcher.pid("a-told") == launcher.pid("b-told") == 1


def test_a_job_that_ignores_sighup_continues(launcher, tmp_path):
    # As nohup(1) starts it.
    worker = python("""
        import os, pathlib, time
        pathlib.Path("pid").write_text(str(os.getpid()))
        while not pathlib.Path("hung-up").exists():
            time.sleep(0.01)
    """)
    ignoring = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    process = launcher.start(worker, worker, prefix=ignoring)
    launcher.pid("pid")
    process.send_signal(signal.SIGHUP)
    (tmp_path / "hung-up").write_text("")
    assert process.wait() == 0


def test_workers_start_with_default_signals(launcher):
    worker = shell("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    for line in launcher.run(worker, worker, show=[0]).lines:
        assert line.split()[1] == "0" * 16, line


def test_each_worker_leads_a_group_of_its_own(launcher):
    code = "import os; print(os.getpid() == os.getpgid(0))"
    assert sorted(launcher.run(python(code), python(code)).lines) == ["[0] True", "[1] True"]


def test_a_parent_that_ignores_sigchld_changes_nothing(launcher):
    ignoring = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(17, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    assert launcher.run(shell("exit 3"), ["/bin/true"], prefix=ignoring).code == 3


def test_earlier_children_of_the_launcher_are_spared(launcher):
    worker = telling("worker")
    with_child = ["/bin/sh", "-c", 'sleep 600 & echo $! > spared; exec "$@"', "sh"]
    process = launcher.start(worker, worker, prefix=with_child)
    supervisor = parent(launcher.pid("worker"))
    os.kill(supervisor, signal.SIGKILL)
    assert process.wait() == 137
    spared = launcher.pid("spared")
    assert alive(spared)
    os.kill(spared, signal.SIGKILL)


class Terminal:
    """A session with a terminal of its own, in which a command is the foreground job of a shell."""

    def __init__(self, launcher, *command):
        self.ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self.shell = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=launcher.dir,
            env={**os.environ, "PS1": "", "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def type(self, text):
        os.write(self.ours, text.encode())

    def close(self):
        os.close(self.ours)
        self.shell.kill()
        self.shell.wait()


@pytest.fixture
def terminal(launcher):
    terminal = Terminal(launcher)
    yield terminal
    terminal.close()


def typed(launcher, *workers, around="", **launch):
    """The command line of the driver for a plan, with another command around it."""
    described = [{"argv": worker} for worker in workers]
    path = launcher.dir / "typed.json"
    path.write_text(json.dumps({"workers": described, "launch": launch}))
    root = HERE.parent.parent
    return f"PYTHONPATH={root} {around}{sys.executable} {HERE / 'driver.py'} {path}; echo $? > code\n"


def test_ctrl_c_at_a_terminal_ends_all_with_130(launcher, terminal):
    terminal.type(typed(launcher, telling("a"), telling("b")))
    pids = [launcher.pid("a"), launcher.pid("b")]
    terminal.type("\x03")
    assert launcher.pid("code") == 130
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("around", ["", "/bin/sh -c '\"$@\"; exit $?' sh "], ids=["a job", "a script's"])
def test_ctrl_z_stops_the_workers_and_fg_resumes_them(launcher, terminal, around):
    worker = python("""
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    """)
    terminal.type(typed(launcher, [*worker, "a"], [*worker, "b"], around=around))
    pids = [launcher.pid("a"), launcher.pid("b")]
    terminal.type("\x1a")
    eventually(lambda: all(stopped(pid) for pid in pids), "stopped workers")
    terminal.type("fg; echo $? > after\n")
    eventually(lambda: not any(stopped(pid) for pid in pids), "running workers")
    (launcher.dir / "go").write_text("")
    assert launcher.pid("after") == 0


def test_a_job_without_a_shell_to_resume_it_is_not_stopped(launcher):
    worker = python("""
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    """)
    process = launcher.start([*worker, "a"], [*worker, "b"], popen={"start_new_session": True})
    launcher.pid("a"), launcher.pid("b")
    process.send_signal(signal.SIGTSTP)
    (launcher.dir / "go").write_text("")
    assert process.wait() == 0


def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def test_a_worker_that_reads_sees_the_end_of_input_at_a_terminal(launcher, terminal):
    terminal.type(typed(launcher, ["/bin/cat"], log_dir="logs"))
    assert launcher.pid("code") == 0


def test_a_worker_has_no_terminal_that_would_stop_it(launcher, terminal):
    asking = python("""
        import errno, os, sys
        try:
            os.open("/dev/tty", os.O_RDWR)
        except OSError as error:
            sys.exit(0 if error.errno == errno.ENXIO else 1)
        sys.exit(7)
    """)
    for workers, logs, code in (([asking], None, 7), ([asking], "logs", 0), ([asking, asking], None, 0)):
        terminal.type(typed(launcher, *workers, log_dir=logs))
        assert launcher.pid("code") == code
        (launcher.dir / "code").unlink()
    terminal.type(typed(launcher, shell("stty sane < /dev/tty"), log_dir="logs"))
    assert launcher.pid("code") != 0


def test_output_reaches_a_terminal_that_stops_background_writers(launcher, terminal):
    terminal.type("stty tostop\n")
    terminal.type(typed(launcher, shell("echo text"), shell("echo text")))
    assert launcher.pid("code") == 0


def test_an_idle_supervisor_uses_no_cpu(launcher):
    launcher.start(telling("a"), telling("b"))
    supervisor = parent(launcher.pid("a"))
    launcher.pid("b")
    eventually(lambda: sleeps(supervisor), "two seconds without a wake-up")


def test_no_process_is_left_after_an_error_in_the_supervisor(launcher):
    # The supervisor's clock raises once the workers run.
    faulty = python("""
        import os, sys, time
        from cpulaunch.launch.process.bind import UNBOUND
        from cpulaunch.launch.process.guard import fork_supervisor
        from cpulaunch.launch.output.routing import open_output_routing
        from cpulaunch.launch.process.exec_spec import ExecSpec
        from cpulaunch.launch.supervision.options import SupervisorOptions
        from cpulaunch.launch.supervision.supervisor import Supervisor
        from cpulaunch.records.plan import LaunchOptions, LaunchPlan, WorkerPlan

        worker = WorkerPlan(index=0, cpus=frozenset(), numa_nodes=frozenset(), mempolicy="none", threads=1, env=(),
                            argv=("/bin/sh", "-c", "echo $$ > worker; setsid sleep 600 & echo $! > orphan; wait"))
        plan = LaunchPlan(mode="single", profile=None, world_size=1, workers=(worker,), notes=(), warnings=(),
                          launch=LaunchOptions(show=frozenset()))
        link = fork_supervisor(print, workers=1, grace_seconds=1)
        routing = open_output_routing(plan)
        spec = ExecSpec(worker=0, path="/bin/sh", argv=worker.argv, environ=dict(os.environ), binding=UNBOUND)
        options = SupervisorOptions(inherited=link.inherited, grace_seconds=1, control=link.control)

        def clock():
            while not (os.path.exists("worker") and os.path.exists("orphan")):
                time.sleep(0.01)
            raise ZeroDivisionError("the clock broke")

        with Supervisor(routing, options, clock=clock, wall_clock=time.time) as supervisor:
            supervisor.start([spec], routing.stdio)
            supervisor.run()
    """)
    process = launcher.start(faulty)
    _, error = process.communicate()
    assert b"the clock broke" in error
    assert process.returncode == 1
    assert not alive(launcher.pid("worker"))
    assert not alive(launcher.pid("orphan"))


def test_servers_that_shut_down_in_order_are_a_success(launcher):
    server = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    """
    for number, codes, expected in ((signal.SIGTERM, "00", 0), (signal.SIGTERM, "03", 143)):
        process = launcher.start(*(python(server, f"{code}{index}{codes}", code) for index, code in enumerate(codes)))
        for index, code in enumerate(codes):
            launcher.pid(f"{code}{index}{codes}")
        process.send_signal(number)
        assert process.wait() == expected


def test_ctrl_c_says_what_the_launch_waits_for(launcher):
    slow = python("""
        import os, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open("slow", "w").write(str(os.getpid()))
        time.sleep(600)
    """)
    process = launcher.start(slow, telling("quick"), grace_seconds=40)
    launcher.pid("slow"), launcher.pid("quick")
    process.send_signal(signal.SIGINT)
    line = process.stderr.readline()
    before, seconds, after = re.split(rb"(\d+) seconds ", line)
    assert (before, after) == (
        b"cpulaunch: interrupted: waiting up to ",
        b"for 1 worker (0); Ctrl-C again kills at once\n",
    )
    assert int(seconds) < 40
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
