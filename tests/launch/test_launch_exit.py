"""Exit codes of several workers, and the summary of a failure."""

import os
import signal

import psutil
import pytest

from cpulaunch.system.libc import is_linux
from tests.launch.launching import alive, eventually, python, shell

WAIT = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ((["/bin/true"], ["/bin/true"]), 0),
        ((["/bin/true"], shell("exit 3")), 3),
        ((shell("kill -SEGV $$"), ["/bin/true"]), 128 + signal.SIGSEGV),
        ((shell("kill -KILL $$"), python(WAIT)), 137),
        ((python(WAIT), python(WAIT), shell("exit 5")), 5),
    ],
)
def test_the_exit_code_is_the_failing_workers(launcher, workers, code):
    assert launcher.run(*workers).code == code


def test_the_exit_code_is_that_of_the_first_failure_in_time(launcher, tmp_path):
    # Worker 0 fails only when it sees worker 1's failure end it.
    late = python("""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        pathlib.Path("ready").write_text("1")
        time.sleep(600)
    """)
    early = python("""
        import pathlib, sys, time
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        sys.exit(4)
    """)
    outcome = launcher.run(late, early)
    assert outcome.code == 4
    assert "worker 1" in outcome.error


def test_the_first_of_two_failures_decides_even_if_both_are_noticed_at_once(launcher, tmp_path):
    # The supervisor is stopped meanwhile, as a slow disk or a busy machine may delay it, and so are its guards, which
    # would continue it.
    worker = python("""
        import os, pathlib, sys, time
        index = sys.argv[1]
        pathlib.Path(f"new-{index}").write_text(f"{os.getpid()} {os.getppid()}")
        os.rename(f"new-{index}", f"pid-{index}")
        while not pathlib.Path(f"fail-{index}").exists():
            time.sleep(0.01)
        sys.exit(3 + int(index))
    """)
    process = launcher.start([*worker, "0"], [*worker, "1"])
    pids = []
    for index in (0, 1):
        path = tmp_path / f"pid-{index}"
        eventually(path.exists, "a started worker")
        pid, supervisor = map(int, path.read_text().split())
        pids.append(pid)
    stopped = (process.pid, psutil.Process(supervisor).ppid(), supervisor)
    for each in stopped:
        os.kill(each, signal.SIGSTOP)
    for index in (1, 0):
        (tmp_path / f"fail-{index}").touch()
        eventually(lambda pid=pids[index]: not alive(pid), "the end of a worker")
    for each in reversed(stopped):
        os.kill(each, signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 4
    assert b"worker 1" in err


def test_the_summary_names_worker_signal_and_last_lines(launcher):
    broken = python("""
        import os, sys
        print("Traceback: the reason", file=sys.stderr)
        os.kill(os.getpid(), 11)
    """)
    error = launcher.run(python(WAIT), broken).error
    assert "worker 1" in error
    assert "killed by SIGSEGV (signal 11: segmentation fault)" in error
    assert error.rstrip().splitlines()[-1] == "  Traceback: the reason"


def test_the_summary_names_the_exit_code_and_the_log(launcher):
    outcome = launcher.run(shell("echo why >&2; exit 3"), log_dir="logs")
    assert outcome.code == 3
    assert "failed: exit code 3" in outcome.error
    assert "log: logs/worker-0.log" in outcome.error


def test_an_out_of_memory_kill_is_named_as_such(launcher, tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 4\n")
    killed = shell("printf 'oom 5\\noom_kill 5\\n' > memory.events; kill -KILL $$")
    outcome = launcher.run(killed, ["/bin/true"], memory_events=str(events))
    assert outcome.code == 137
    assert "out of memory" in outcome.error


def test_a_kill_without_an_event_is_not_called_out_of_memory(launcher, tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 4\n")
    outcome = launcher.run(shell("kill -KILL $$"), ["/bin/true"], memory_events=str(events))
    assert "out of memory" not in outcome.error


@pytest.mark.skipif(not is_linux(), reason="cgroups are Linux's")
@pytest.mark.parametrize("put", ["mkfifo memory.events", "ln -s /dev/zero memory.events"], ids=["pipe", "endless"])
def test_what_a_worker_puts_in_place_of_its_cgroups_events_holds_no_end_up(launcher, tmp_path, put):
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 4\n")
    assert launcher.run(shell(f"rm memory.events; {put}; exit 3"), ["/bin/true"], memory_events=str(events)).code == 3


def test_there_is_no_summary_after_success(launcher):
    assert launcher.run(["/bin/true"], ["/bin/true"]).error == ""


def test_a_command_that_cannot_start_starts_nothing(launcher, tmp_path):
    outcome = launcher.run(shell("touch started"), ["/no/such/program"])
    assert outcome.code == 127
    assert not (tmp_path / "started").exists()


def test_the_supervisors_memory_stays_small(launcher):
    code = """
        import os, sys
        status = open(f"/proc/{os.getppid()}/status").read()
        print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    """
    peaks = [int(line.split()[-1]) for line in launcher.run(python(code), python(code)).lines]
    assert len(peaks) == 2
    assert max(peaks) < 30 * 1024
