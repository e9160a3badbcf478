"""Runs with a report, a metric or a start barrier: the observations, and that no file of a run remains."""

import os
import signal
import subprocess
import sys

import pytest

from cpulaunch.launch.process.run_directory import make_private_path
from cpulaunch.records.errors import LaunchError
from tests import json_output
from tests.launch.launching import alive, eventually, inheriting, python, shell, sleeps


@pytest.fixture
def runs(tmp_path):
    """Where the directories of runs are made: all must be gone after the test."""
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    eventually(lambda: not list(folder.iterdir()), "the end of the run's directory")


@pytest.fixture
def watched(launcher, runs):
    """Starts or runs workers of which a report is written; `report` reads it."""

    class Watched:
        def start(self, *workers, env=None, **options):
            return launcher.start(*workers, env={"TMPDIR": str(runs), **(env or {})}, **{"report": "r.json"} | options)

        def run(self, *workers, env=None, **options):
            return launcher.run(*workers, env={"TMPDIR": str(runs), **(env or {})}, **{"report": "r.json"} | options)

        def report(self):
            return json_output.read("report", (launcher.dir / "r.json").read_text())

        def parts(self, name):
            return [worker[name] for worker in self.report()["workers"]]

    return Watched()


TELLING = "import cpulaunch, sys; cpulaunch.metric('x', float(sys.argv[1])); "


@pytest.mark.parametrize("workers", [1, 2])
def test_times_memory_and_exit_codes_are_reported(watched, workers):
    outcome = watched.run(*(python(TELLING + "print('out')", str(index + 1)) for index in range(workers)))
    assert outcome.code == 0
    report = watched.report()
    assert report["metrics"] == {"x": {"sum": sum(range(1, workers + 1)), "values": [1.0, 2.0][:workers]}}
    assert watched.parts("exit_code") == [0] * workers
    assert all(seconds > 0 for seconds in watched.parts("wall_seconds"))
    assert report["wall_seconds"] >= max(watched.parts("wall_seconds"))
    assert all(peak > 1 << 20 for peak in watched.parts("peak_memory_bytes"))


def test_a_single_worker_keeps_its_output_and_input(watched, launcher):
    process = watched.start(["/bin/cat"], popen={"stdin": subprocess.PIPE})
    assert process.communicate(b"given\n") == (b"given\n", b"")


def test_a_crash_is_reported(watched):
    code = TELLING + "import os; os.abort()"
    assert watched.run(python(code, "3"), shell("exec sleep 600")).code == 128 + signal.SIGABRT
    assert watched.parts("signal") == [signal.SIGABRT, signal.SIGTERM]
    assert watched.report()["metrics"] == {"x": {"sum": 3.0, "values": [3.0, None]}}


def test_a_killed_worker_is_reported(watched, launcher):
    code = TELLING + "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    process = watched.start(python(code, "3"))
    os.kill(launcher.pid("pid"), signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    assert watched.parts("signal") == [signal.SIGKILL]
    assert watched.parts("metrics") == [{"x": 3.0}]


def test_a_run_ended_by_a_signal_is_reported(watched, launcher):
    process = watched.start(shell("echo $$ > pid; exec sleep 600"))
    launcher.pid("pid")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert (watched.report()["exit_code"], watched.parts("signal")) == (143, [signal.SIGTERM])


def test_the_report_is_on_the_program_inside_a_shell(watched):
    code = "import cpulaunch, sys; cpulaunch.metric('x', 1); b = b'.' * (100 << 20)"
    outcome = watched.run(shell(f'"{sys.executable}" -c "{code}"; exit $?'))
    assert outcome.code == 0
    assert watched.parts("metrics") == [{"x": 1.0}]
    assert watched.parts("peak_memory_bytes")[0] > 100 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux's /proc")
def test_a_worker_without_the_plugin_is_sampled_while_it_runs(watched, launcher):
    cpu = min(os.sched_getaffinity(0))
    process = watched.start({"argv": shell("echo $$ > pid; exec sleep 600"), "cpus": [cpu]})
    pid = launcher.pid("pid")
    before = reads(parent(pid))
    eventually(lambda: reads(parent(pid)) > before + 20, "a look at the worker")
    process.send_signal(signal.SIGTERM)
    process.wait()
    (binding,) = watched.parts("binding")
    assert (binding["pid"], binding["command"]) == (pid, "sleep 600")
    assert binding["threads"] == [{"cpus": str(cpu), "count": 1}]
    assert binding["as_planned"] is True
    assert watched.parts("plugin") == ["not loaded"]


def reads(pid):
    """How many times the process has read something: the supervisor sleeps, except when it samples workers."""
    with open(f"/proc/{pid}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("syscr"))


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("killed", ["guard", "supervisor"])
def test_a_killed_launch_leaves_no_directory(watched, launcher, runs, killed):
    process = watched.start(python("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"))
    pid = launcher.pid("pid")
    assert list(runs.iterdir())
    os.kill(process.pid if killed == "guard" else parent(pid), signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(pid), "the end of the worker")


def test_descriptors_that_run_out_leave_no_directory(watched, launcher):
    inherited = "".join(f"exec {number}</dev/null; " for number in range(10, 32))
    program = f'for n in $(seq 3 9); do eval "exec $n</dev/null"; done; {inherited} ulimit -n 40; exec "$@"'
    outcome = watched.run(["/bin/true"], prefix=["/bin/bash", "-c", program, "bash"])
    assert outcome.code == 125
    assert outcome.error.splitlines()[-1] == "hint: ulimit -n 4096"
    assert "Traceback" not in outcome.error


@pytest.mark.parametrize("descriptors", range(50, 59))
def test_a_launch_leaves_no_directory_wherever_descriptors_run_out(watched, runs, descriptors):
    """The guards hold some in reserve, as the supervisor may have none left when it is to remove the directory."""
    outcome = watched.run(["/bin/true"], prefix=inheriting(descriptors, "-n 64"))
    assert outcome.code == 125
    assert outcome.error.splitlines()[-1] == "hint: ulimit -n 4096"
    assert not list(runs.iterdir())


def test_the_limit_on_open_files_is_raised_by_what_is_inherited(watched):
    outcome = watched.run(["/bin/sh", "-c", "ulimit -Sn"], prefix=inheriting(50, "-Sn 64"))
    assert (outcome.code, outcome.out) == (0, b"64\n"), outcome.error


def test_a_start_that_fails_leaves_no_directory(watched, launcher):
    (launcher.dir / "data").write_text("text\n")
    (launcher.dir / "data").chmod(0o755)
    assert watched.run([str(launcher.dir / "data")]).code == 126


@pytest.mark.parametrize("folder", ["/proc", "/nonexistent/scratch"])
def test_another_directory_is_used_if_tmpdir_is_not_writable(watched, folder):
    assert watched.run(["/bin/true"], env={"TMPDIR": folder}).code == 0


def test_a_run_directory_that_cannot_be_made_is_an_error():
    with pytest.raises(LaunchError, match="cannot create the files of this run: /proc/x") as error:
        make_private_path("/proc/x")
    assert "set TMPDIR" in str(error.value)


LEAK = {"CPULAUNCH_EVENTS": "/of/an/outer/launch", "CPULAUNCH_WORKER": "{}", "CPULAUNCH_WORKER_PID": "1"}


@pytest.mark.parametrize("options", [{}, {"log_dir": "logs"}], ids=["replaced", "supervised"])
def test_variables_of_an_outer_launch_reach_no_inner_worker(launcher, options):
    outcome = launcher.run(["/usr/bin/env"], env=LEAK, **options)
    assert not [line for line in outcome.lines if line.startswith("CPULAUNCH_")]


def test_each_worker_has_its_own_event_file(watched):
    outcome = watched.run(*[shell('echo "${CPULAUNCH_EVENTS##*/}"')] * 2, env=LEAK)
    assert sorted(outcome.lines) == ["[0] worker-0.jsonl", "[1] worker-1.jsonl"]


@pytest.mark.parametrize(
    "options", [{}, {"show": []}, {"show": [], "log_dir": "logs"}], ids=["shown", "hidden", "logged"]
)
def test_a_metric_is_found_wherever_the_output_goes(watched, options):
    worker = shell("echo 'x 1'; printf 'x %s' $((2 + $0))")
    outcome = watched.run([*worker, "1"], [*worker[:2], "echo 'x 5' >&2"], metric=r"x (\d+)", **options)
    assert outcome.code == 0
    assert watched.report()["metrics"] == {"x": {"sum": 8.0, "values": [3.0, 5.0]}}


def test_a_pattern_that_backtracks_for_ever_does_not_hold_up_a_launch(watched):
    outcome = watched.run(shell("echo aab 1; printf %040d 0 | tr 0 a"), metric=r"(?:a+)+b ([0-9])")
    assert outcome.code == 0
    assert watched.report()["metrics"] == {"metric": {"sum": 1.0, "values": [1.0]}}


READY = """
    import os, pathlib, sys, cpulaunch
    pathlib.Path("waiting-" + sys.argv[1]).write_text(str(os.getpid()))
    cpulaunch.ready()
    print("arrived:", *sorted(path.name for path in pathlib.Path().glob("waiting-*")))
    cpulaunch.ready()
"""
LATE = READY.replace("import os,", "import time, os,").replace(
    "    pathlib.Path", "    while not os.path.exists('go'):\n        time.sleep(0.01)\n    pathlib.Path", 1
)


def at_barrier(pid):
    """Whether the process waits for the gate: it then reads a pipe."""
    with open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    return state == "S" and any(name.endswith("/gate") for name in open_files(pid))


def open_files(pid):
    try:
        return [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def test_no_worker_passes_the_barrier_before_all_have_arrived(watched, launcher):
    process = watched.start(python(READY, "0"), python(LATE, "1"), start_barrier=True)
    pid = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(pid), "a worker that waits")
    (launcher.dir / "go").write_text("")
    out, _ = process.communicate()
    assert process.returncode == 0
    assert sorted(out.decode().splitlines()) == [f"[{index}] arrived: waiting-0 waiting-1" for index in (0, 1)]


@pytest.mark.parametrize("options", [{}, {"start_barrier": True}], ids=["no barrier", "a barrier"])
def test_a_single_worker_passes_the_barrier_at_once(watched, options):
    assert watched.run(python(READY, "0"), **options).lines == ["arrived: waiting-0"]


def test_the_barrier_does_not_wait_for_a_worker_that_has_ended(watched):
    outcome = watched.run(python(READY, "0"), ["/bin/true"], start_barrier=True)
    assert (outcome.code, outcome.lines) == (0, ["[0] arrived: waiting-0"])


def test_a_worker_that_fails_before_arriving_ends_all(watched, launcher):
    late = shell("until [ -s waiting-0 ]; do sleep 0.01; done; exit 3")
    outcome = watched.run(python(READY, "0"), late, start_barrier=True)
    assert (outcome.code, outcome.lines) == (3, [])
    assert watched.parts("signal") == [signal.SIGTERM, None]


def test_a_worker_killed_before_arriving_ends_all(watched, launcher):
    process = watched.start(python(READY, "0"), python(LATE, "1"), start_barrier=True)
    worker = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(worker), "a worker that waits")
    with open(f"/proc/{parent(worker)}/task/{parent(worker)}/children") as file:
        (other,) = {int(pid) for pid in file.read().split()} - {worker}
    os.kill(other, signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    assert watched.parts("signal") == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("killed", ["guard", "supervisor"])
def test_no_worker_waits_for_a_launch_that_was_killed(watched, launcher, killed):
    process = watched.start(python(READY, "0"), shell("exec sleep 600"), start_barrier=True)
    worker = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(worker), "a worker that waits")
    os.kill(process.pid if killed == "guard" else parent(worker), signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(worker), "the end of the worker")


def test_programs_inside_a_shell_meet_at_the_barrier(watched, launcher):
    (launcher.dir / "ready.py").write_text("import cpulaunch\ncpulaunch.ready()\nprint('passed')\n")
    outcome = watched.run(*[shell(f"{sys.executable} ready.py; {sys.executable} ready.py")] * 2, start_barrier=True)
    assert sorted(outcome.lines) == ["[0] passed", "[0] passed", "[1] passed", "[1] passed"]


FAMILY = """
import multiprocessing, os, pathlib, cpulaunch
from cpulaunch.worker.reporting.process_identity import claim

def child(kind):
    cpulaunch.ready()
    print(kind, flush=True)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
    claim()  # As the plugin does when the worker loads torch.
    if os.fork() == 0:
        child("plain")
        os._exit(0)
    os.wait()
    pathlib.Path("go").write_text("")
    cpulaunch.ready()
    print("worker")
"""


def test_children_of_a_worker_never_wait(watched, launcher):
    (launcher.dir / "family.py").write_text(FAMILY)
    outcome = watched.run([sys.executable, "-u", "family.py"], python(LATE, "1"), start_barrier=True, show=[0])
    assert outcome.lines == ["fork", "spawn", "plain", "worker"]


def test_sigterm_ends_a_worker_that_waits(watched, launcher):
    process = watched.start(python(READY, "0"), shell("exec sleep 600"), start_barrier=True)
    worker = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(worker), "a worker that waits")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert not alive(worker)
    assert watched.parts("signal") == [signal.SIGTERM, signal.SIGTERM]


def test_ctrl_c_interrupts_a_worker_that_waits(watched, launcher):
    worker = python(
        READY.replace(
            "cpulaunch.ready()",
            """
    try:
        cpulaunch.ready()
    except KeyboardInterrupt:
        print("interrupted")
        raise SystemExit(0)
    """.strip(),
            1,
        ),
        "0",
    )
    process = watched.start(worker, shell("exec sleep 600"), start_barrier=True)
    pid = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(pid), "a worker that waits")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert (process.returncode, out) == (130, b"[0] interrupted\n")


def test_a_waiting_worker_can_be_stopped_and_resumed(watched, launcher):
    process = watched.start(python(READY, "0"), python(LATE, "1"), start_barrier=True)
    pid = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(pid), "a worker that waits")
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    (launcher.dir / "go").write_text("")
    assert process.wait() == 0


def test_a_supervisor_uses_no_cpu_at_a_barrier(watched, launcher):
    process = watched.start(python(READY, "0"), shell("exec sleep 600"), start_barrier=True, report=None)
    worker = launcher.pid("waiting-0")
    eventually(lambda: at_barrier(worker), "a worker that waits")
    supervisor = parent(worker)
    eventually(lambda: sleeps(supervisor), "two seconds without a wake-up")
    process.send_signal(signal.SIGTERM)
    process.wait()
