"""Whichever two of guard, inner guard and supervisor are killed at once, at whatever moment: nothing is left."""

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpulaunch.system.control_group import MOUNTS, PREFIX
from tests.launch.launching import alive, eventually, interrupt_again, python
from tests.launch.process.killing import (
    HIDE_CGROUPS,
    ROOT,
    TARGETS,
    abandoned_cgroups,
    chain,
    count_leftovers,
    send_kill,
)
from tests.launch.process.test_hidden_ends import TRACER
from tests.launch.process.test_hostile_workers import HELD_AT_EXIT, SEIZED, may_trace
from tests.launch.test_launch_signals import family, members

KILLS, KILLS_OF_HOSTS = 12, 3
"""For each engine, with and without cgroups; `python -m tests.launch.process.killing` takes as many as one wants."""
CGROUPS = {"with cgroups": (), "without cgroups": HIDE_CGROUPS}


@pytest.fixture(params=CGROUPS)
def prefix(request):
    if request.param == "without cgroups" and os.geteuid() != 0:
        pytest.skip("only root can hide its cgroups")
    return CGROUPS[request.param]


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_no_process_is_left(launcher, prefix, targets):
    process = launcher.start(family("a"), family("b"), prefix=prefix)
    workers = members(launcher, "a") + members(launcher, "b")
    pids = chain(process.pid)
    for target in targets:
        send_kill(pids[target])  # The third may have ended it already.
    process.wait()
    eventually(lambda: not any(map(alive, [*workers, *pids.values()])), f"the end of {workers} and {pids}")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "instances", "ranks"])
def test_nothing_is_left_after_kills_at_random_moments(tmp_path, prefix, engine):
    before = abandoned_cgroups()
    assert count_leftovers(engine, KILLS, folder=tmp_path, prefix=prefix, seconds=10.0)["left"] == {}
    eventually(lambda: abandoned_cgroups() <= before, "the removal of the cgroups")


@pytest.mark.slow
@pytest.mark.torch
def test_nothing_is_left_of_several_hosts_after_kills_at_random_moments(tmp_path, prefix):
    counted = count_leftovers("elastic", KILLS_OF_HOSTS, folder=tmp_path, prefix=prefix, width=2, seconds=10.0)
    assert counted["left"] == {}


KILLED_AT_FORK = """
import os, signal, sys
os.fork = lambda: os.kill(os.getpid(), signal.SIGKILL)
sys.argv[0] = "cpulaunch"
from cpulaunch.__main__ import main
main()
"""


EARLY = {
    "instances": ("--instances", "2", "--report", "report.json"),
    "ranks": ("--nproc-per-node", "2"),
    "ranks with logs": ("--nproc-per-node", "2", "--tee", "3"),
    "several hosts with logs": ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--tee", "3"),
}


@pytest.mark.parametrize("options", EARLY.values(), ids=EARLY.keys())
def test_no_run_folder_is_left_of_a_launch_killed_early(tmp_path, options):
    """It is made after the fork: until then no other process could remove it."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text("")
    command = [
        sys.executable,
        "-c",
        KILLED_AT_FORK,
        "--openmp",
        "default",
        "--allocator",
        "default",
        *options,
        "program.py",
    ]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert os.listdir(tmp_path / "tmp") == []


KILLED_AT_REMOVAL = """
import os, signal, sys
from cpulaunch.launch.process.run_directory import Remains
outer, plain = os.getpid(), Remains.remove
Remains.remove = lambda remains: os.kill(outer, signal.SIGKILL) if os.getpid() == outer else plain(remains)
sys.argv[0] = "cpulaunch"
from cpulaunch.__main__ import main
main()
"""


def test_no_run_folder_is_left_if_both_guards_are_killed_one_after_the_other(tmp_path):
    """The outer one, when it has ended what the inner one has left, and has removed nothing yet."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    command = [sys.executable, "-c", KILLED_AT_REMOVAL, "--instances", "2", "--report", "r.json", "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert os.listdir(tmp_path / "tmp")
        os.kill(chain(process.pid)["inner"], signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.torch
def test_no_empty_folder_of_logs_is_left_of_a_killed_supervisor(tmp_path):
    """Its files are kept, but there are none before a rank has started."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "stop").mkdir()
    # The agent's Python stops before torch's agent makes a folder in that of the logs.
    (tmp_path / "stop" / "sitecustomize.py").write_text(
        "import sys, time\n'agent' in ' '.join(sys.orig_argv) and time.sleep(600)"
    )
    (tmp_path / "program.py").write_text("")
    command = [sys.executable, "-m", "cpulaunch", *EARLY["several hosts with logs"], "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": f"{tmp_path / 'stop'}:{ROOT}"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: len(os.listdir(tmp_path / "tmp")) == 2, "the folders of the run and of its logs")
    supervisor = eventually(lambda: chain(process.pid)["supervisor"], "a supervisor")
    os.kill(supervisor, signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    assert os.listdir(tmp_path / "tmp") == []


SLOW = """
import os, signal, time
def end(*_):
    open(f"asked-{os.getpid()}", "w").close()
    time.sleep(600)
signal.signal(signal.SIGTERM, end)
open(f"pid-{os.getpid()}", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("is_ending", [False, True])
@pytest.mark.parametrize("target", ["guard", "inner", "supervisor"])
def test_a_killed_comparison_leaves_nothing_of_the_launch_that_it_measures(tmp_path, prefix, target, is_ending):
    """Even if the program takes longer to end after SIGTERM than the guards wait for the comparison."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(SLOW)
    sides = ["--instances 2 --oversubscribe", "--instances 2 --oversubscribe --env A=1"]
    command = [*prefix, sys.executable, "-m", "cpulaunch", "compare", *sides, "--", "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as process:
        pids = eventually(lambda: _pids(tmp_path), "two instances")
        assert len(os.listdir(tmp_path / "tmp")) == 2  # Of the comparison, and of the launch.
        if is_ending:
            process.terminate()
            eventually(lambda: len(list(tmp_path.glob("asked-*"))) == 2, "SIGTERM at both instances")
        os.kill(chain(process.pid)[target], signal.SIGKILL)
        process.wait()
    eventually(lambda: not any(map(alive, pids)), "the end of the launch")
    eventually(lambda: not os.listdir(tmp_path / "tmp"), "the removal of its files")


MEASURING = {
    "compare": ("--wall-time", "python", "--threads 1", "--"),
    "diagnose": (),
    "tune": ("--wall-time", "--vary", "threads=1"),
}


@pytest.mark.parametrize("command", MEASURING)
def test_a_measurement_whose_guards_are_both_killed_leaves_nothing(tmp_path, prefix, command):
    if command == "tune" and importlib.util.find_spec("optuna") is None:
        pytest.skip("the extra tune is not installed")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(SLOW)
    words = [*prefix, sys.executable, "-m", "cpulaunch", command, *MEASURING[command], "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    with subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
        pids = eventually(lambda: [int(path.name[4:]) for path in tmp_path.glob("pid-*")], "the program")
        launcher = chain(it.pid)
        cgroup = Path(f"/proc/{launcher['supervisor']}/cgroup").read_text().rpartition("0::")[2].strip()
        for target in ("guard", "inner"):
            send_kill(launcher[target])
    eventually(lambda: not any(map(alive, [*pids, launcher["supervisor"]])), "the end of the measurement")
    assert os.listdir(tmp_path / "tmp") == []
    assert PREFIX not in cgroup or not any(os.path.exists(f"{mount}{cgroup}") for mount in MOUNTS)


def test_ctrl_c_again_ends_a_comparison_at_once(tmp_path, prefix):
    (tmp_path / "program.py").write_text(SLOW)
    (tmp_path / "tmp").mkdir()
    command = [*prefix, sys.executable, "-m", "cpulaunch", "compare", "--instances 2 --oversubscribe", "", "--"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "program.py"], cwd=tmp_path, env=environ, stderr=subprocess.PIPE) as process:
        pids = eventually(lambda: _pids(tmp_path), "two instances")
        process.send_signal(signal.SIGINT)
        eventually(lambda: len(list(tmp_path.glob("asked-*"))) == 2, "SIGTERM at both instances")
        interrupt_again(process)
        _, said = process.communicate()
    assert process.returncode == 130
    assert b"did not read" not in said
    assert not any(map(alive, pids))
    assert not os.listdir(tmp_path / "tmp")


DEAF = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: open(f"asked-{os.getpid()}", "w").close())
open(f"pid-{os.getpid()}", "w").close()
while True:
    time.sleep(600)
"""
PATIENT = """
import sys
from cpulaunch.launch.process import child_watch, descendants, guard
child_watch.CHECK_SECONDS = 0.1
is_gone = sys.argv.pop(1) in ("guard", "inner")  # For the supervisor, the guard is.
limits = (0.0, 100.0) if is_gone else (100.0, 0.0)  # Enough on any machine, however busy.
descendants.LAUNCH_SECONDS, descendants.LOWER_SECONDS = limits
guard.ORPHAN_SECONDS = guard.ABANDONED_SECONDS = float(sys.argv.pop(1))
sys.argv[0] = "cpulaunch"
from cpulaunch.__main__ import main
main()
"""
NESTED = ("cpulaunch", "--instances", "2", "--oversubscribe", "--report", "report.json", "program.py")
BELOW = {
    "a launch": NESTED,
    "a script's launch": ("sh", "-c", f"{' '.join(NESTED)}; exit 3"),
    "ranks": ("cpulaunch", "--nproc-per-node", "2", "--oversubscribe", "program.py"),
}


@contextmanager
def launch_of_launches(tmp_path, prefix, below, *, end):
    """A launch whose worker has started another one, which ends in this context by the `end` of PATIENT.

    After it, nothing of the other one is left, which removes its files itself.
    """
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(DEAF)
    (tmp_path / "cpulaunch").write_text(f'#!/bin/sh\nexec {sys.executable} -m cpulaunch "$@"\n')
    (tmp_path / "cpulaunch").chmod(0o755)
    seconds = "1" if end == "inner and supervisor" else "100"  # The guard waits so long for a supervisor.
    patient = [sys.executable, "-c", PATIENT, end, seconds]
    upper = [*prefix, *patient, "--instances", "1", "--log-dir", "logs", "--no-python"]
    environ = {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen([*upper, *BELOW[below]], cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as process:
        pids = eventually(lambda: _pids(tmp_path), "two instances")
        assert len(os.listdir(tmp_path / "tmp")) == 1
        yield process
        process.wait()
    eventually(lambda: not any(map(alive, pids)), "the end of the instances")
    eventually(lambda: not os.listdir(tmp_path / "tmp"), "the removal of their files")


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("end", ["Ctrl-C twice", "guard", "inner", "supervisor", "inner and supervisor"])
def test_a_launch_that_is_killed_at_once_leaves_nothing_of_one_that_its_worker_started(tmp_path, prefix, below, end):
    with launch_of_launches(tmp_path, prefix, below, end=end) as process:
        if end == "Ctrl-C twice":
            process.send_signal(signal.SIGINT)
            eventually(lambda: len(list(tmp_path.glob("asked-*"))) == 2, "Ctrl-C at both instances")
            interrupt_again(process)
        else:
            stopped = chain(process.pid)
            for each in end.split(" and "):  # Stopped, so that none of them notices the end of another.
                os.kill(stopped[each], signal.SIGSTOP)
            for each in end.split(" and "):
                os.kill(stopped[each], signal.SIGKILL)


@pytest.mark.parametrize("options", [SEIZED, HELD_AT_EXIT], ids=["traced", "held at its end"])
@pytest.mark.parametrize("killed", ["inner", "supervisor"])
def test_a_launch_killed_under_a_debugger_leaves_nothing_of_one_that_its_worker_started(
    tmp_path, prefix, killed, options
):
    """What the debugger traces it does not let go of, so that its parent sees the end otherwise."""
    if not may_trace():
        pytest.skip("may not trace its parent")
    with launch_of_launches(tmp_path, prefix, "a launch", end="supervisor") as process:
        target = chain(process.pid)[killed]
        with subprocess.Popen(python(TRACER, str(target), str(options)), stdout=subprocess.PIPE) as tracer:
            try:
                assert tracer.stdout.readline() == b"traces\n"
                os.kill(target, signal.SIGKILL)
                process.wait()
            finally:
                tracer.kill()


def _pids(folder):
    pids = [int(path.name[4:]) for path in folder.glob("pid-*")]
    return pids if len(pids) == 2 else None
