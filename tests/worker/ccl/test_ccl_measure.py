"""--dist-backend auto: the measurement in real processes, its failures, and the cache of its results."""

import ctypes
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ccl_ranks import LIBRARY

from cpulaunch.launch.measurement import MODULE, CollectiveTimes, measure_collectives
from cpulaunch.records.torch_settings import VARIABLE
from tests import json_output
from tests.plan.machines import TORCH, machine, plan, replace
from tests.worker.applying import clean_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux")

TINY = (4096, 65536)
SECONDS = 120.0
TWO = replace(machine(cores=2), torch=TORCH)


def measured(plan, *, interpreter=sys.executable, seconds=SECONDS, **variables):
    return measure_collectives(
        plan, TINY, interpreter=interpreter, environ=clean_environment(**variables), seconds=seconds
    )


def unbound(ranks=2):
    """A plan whose ranks are not bound: this machine may lack the CPUs of the plan's machine."""
    return plan(TWO, f"--nproc-per-node {ranks} --binder none --allocator default --openmp default")


def stub(tmp_path, text):
    """The path of a shell script that replaces the interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.torch
def test_both_backends_are_measured_at_every_size():
    answer = measured(unbound(), RANK="7", CCL_LOCAL_RANK="7", **{VARIABLE: '{"dist_backend":"ccl"}'})
    assert answer.failure is None
    assert [count for count, _, _ in answer.times] == list(TINY)
    assert all(gloo > 0 and ccl > 0 for _, gloo, ccl in answer.times)


@pytest.mark.torch
def test_the_failure_of_a_rank_is_reported():
    answer = measured(unbound(3), CPULAUNCH_CCL_PATH="sideways")
    assert answer.times == ()
    assert "sideways" in answer.failure


@pytest.mark.torch
def test_missing_cpus_are_a_failure():
    made = unbound()
    elsewhere = replace(made, workers=tuple(replace(each, cpus=frozenset((4095,))) for each in made.workers))
    assert "Invalid argument" in measured(elsewhere).failure


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("echo 'No module named torch' >&2; exit 1", "No module named torch"),
        ("exit 3", "it ended with exit code 3 and no message"),
        ('echo hello; echo \'{"failed": "why"}\'; exit 1', "why"),
        ("echo '{\"times\": [[1, 2]]}'", "it ended with exit code 0 and no message"),
        ("echo '[]'", "it ended with exit code 0 and no message"),
    ],
)
def test_an_invalid_result_is_a_failure_with_a_reason(tmp_path, text, failure):
    assert measured(unbound(), interpreter=stub(tmp_path, text)) == CollectiveTimes(failure=failure)


def test_a_missing_interpreter_is_a_failure():
    assert "cannot be started" in measured(unbound(), interpreter="/no/python").failure


def test_a_measurement_that_hangs_is_ended_with_its_children(tmp_path):
    """The child of the script holds a FIFO open for writing until it ends too."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    interpreter = stub(tmp_path, f"sleep 600 > {fifo} & wait")
    assert measured(unbound(), interpreter=interpreter, seconds=2.0).failure == "no answer within 2 s"
    closed = select.poll()
    closed.register(reader, 0)  # Only POLLHUP, when the last writer has closed. Source: poll(2), fifo(7).
    assert closed.poll(30_000)
    os.close(reader)


def test_no_ranks_start_after_the_launcher_has_exited():
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, "1", ";", "4096"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout) == (1, "")


def watch_folder(path):
    """An inotify descriptor that reports new files of a folder. Source: inotify(7); IN_CREATE is 0x100."""
    libc = ctypes.CDLL(None, use_errno=True)
    watched = libc.inotify_init()
    assert libc.inotify_add_watch(watched, os.fsencode(path), 0x100) >= 0, os.strerror(ctypes.get_errno())
    return watched


def new_files(watched):
    """Names of new files, as they are created."""
    ready = select.poll()  # select.select() takes no descriptor above 1023.
    ready.register(watched, select.POLLIN)
    while ready.poll(SECONDS * 1000):
        data = os.read(watched, 65536)
        while data:
            (size,) = struct.unpack_from("I", data, 12)
            yield os.fsdecode(data[16 : 16 + size].rstrip(b"\0"))
            data = data[16 + size :]


TERMINATED_AT_FORK = """
import os, signal
from cpulaunch.worker.ccl import measure
plain = os.fork

def fork():
    if pid := plain():
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = fork
code = measure.main([str(os.getppid()), ";", "4096"])
try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
except ChildProcessError:
    print(code, "and no rank left")
"""


@pytest.mark.torch
def test_a_signal_that_comes_while_a_rank_is_forked_leaves_none():
    done = subprocess.run(
        [sys.executable, "-P", "-c", TERMINATED_AT_FORK],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == f"{128 + signal.SIGTERM} and no rank left\n", done.stderr


@pytest.mark.torch
@pytest.mark.skipif(LIBRARY is None, reason="oneCCL is not installed")
def test_a_terminated_measurement_removes_the_shared_memory_of_its_ranks():
    """Each rank holds 26 MiB of /dev/shm, and an all-reduce of 64 MiB takes long enough to be interrupted."""
    watched = watch_folder("/dev/shm")
    sizes = ",".join(["67108864"] * 50)
    main = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(os.getpid()), ";", sizes],
        env=clean_environment(CPULAUNCH_CCL_PATH="oneccl"),
    )
    try:
        children = Path(f"/proc/{main.pid}/task/{main.pid}/children")
        held = next(name for name in new_files(watched) if name.split(":")[0] in children.read_text().split())
        ranks = children.read_text().split()
        main.terminate()
        assert main.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        main.kill()
        os.close(watched)
    assert held.split(":")[0] in ranks
    assert [name for name in os.listdir("/dev/shm") if name.split(":")[0] in ranks] == []
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


# A whole launch

PROGRAM = "import torch, torch.distributed as d; d.init_process_group('gloo'); print(d.get_backend(), flush=True)\n"
END = "d.barrier(); d.destroy_process_group()\n"
"""After the barrier, as a rank that leaves gloo closes connections that a slower rank is still making."""
AUTO = ("--nproc-per-node", "2", "--dist-backend", "auto", "--allocator", "default", "--openmp", "default")


def cpulaunch(tmp_path, *arguments, **variables):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM + END)
    return subprocess.run(
        [sys.executable, "-m", "cpulaunch", *arguments, str(program)],
        env=clean_environment(XDG_CACHE_HOME=str(tmp_path / "cache"), **variables),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def decision_lines(done):
    return [line for line in done.stderr.splitlines() if "--dist-backend auto" in line]


def note_of_plan(tmp_path, *arguments):
    printed = json_output.read("plan", cpulaunch(tmp_path, "plan", "--json", *arguments).stdout)
    (note,) = [note for note in printed["notes"] if note["setting"] == "dist_backend"]
    return note["value"], note["reason"]


@pytest.mark.slow
@pytest.mark.torch
def test_a_launch_measures_once_and_plan_never_measures(tmp_path):
    assert "not measured on this host yet" in note_of_plan(tmp_path, *AUTO)[1]
    assert not (tmp_path / "cache" / "cpulaunch" / "collectives").exists()
    first, second = cpulaunch(tmp_path, *AUTO), cpulaunch(tmp_path, *AUTO)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    (line,) = decision_lines(first)
    if "no answer within" in line:
        pytest.skip(f"this machine is too busy to import torch and to measure within a minute: {line}")
    assert decision_lines(second) == []
    chosen = line.split("auto: ")[1].split(":")[0]
    assert set(first.stdout.split()) == set(second.stdout.split()) == {chosen}
    value, reason = note_of_plan(tmp_path, *AUTO)
    assert value == ("ccl" if chosen == "ccl" else "the program's own")
    assert reason.endswith("measured here before")
    assert "not measured" in note_of_plan(tmp_path, "--env", "CCL_ATL_SHM=0", *AUTO)[1]


@pytest.mark.slow
@pytest.mark.torch
def test_a_failed_measurement_is_reported_and_not_cached(tmp_path):
    done = cpulaunch(tmp_path, *AUTO, CPULAUNCH_CCL_PATH="sideways")
    assert done.returncode == 0, done.stderr
    (line,) = decision_lines(done)
    assert "keeps gloo: the measurement failed (" in line
    assert set(done.stdout.split()) == {"gloo"}
    assert not (tmp_path / "cache" / "cpulaunch" / "collectives").exists()
