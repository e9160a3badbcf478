"""The pipes of the start barrier can be opened by any process of a worker: that holds no other worker."""

import os
import select
import subprocess
import sys

import pytest

from cpulaunch.launch.monitor.start_barrier import StartBarrier
from cpulaunch.records.errors import LaunchError
from cpulaunch.system.libc import is_linux
from tests.launch.launching import eventually

READY = """
import cpulaunch
from cpulaunch.worker.reporting import barrier
barrier.REPEAT_SECONDS = 0.1
cpulaunch.ready()
"""


@pytest.fixture
def barrier(tmp_path):
    """The barrier of a launch with one worker."""
    barrier = StartBarrier(str(tmp_path), frozenset({0}))
    yield barrier
    barrier.close()


@pytest.fixture(params=["", "import select; del select.poll"], ids=["", "without poll"])
def worker(request, barrier, tmp_path):
    """A worker that waits at the barrier; without poll, as where eventlet has removed it."""
    events = {"CPULAUNCH_EVENTS": str(tmp_path / "worker-0.jsonl")}
    code = request.param + READY
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **events}) as process:
        yield process
        process.kill()


def has_arrival(barrier):
    return bool(select.select([barrier.fd], [], [], 20)[0])


def test_an_arrival_that_another_process_has_read_is_repeated(barrier, worker):
    assert has_arrival(barrier)
    os.read(barrier.fd, 100)
    assert has_arrival(barrier)
    barrier.serve(0)
    assert worker.wait(20) == 0


def test_a_worker_passes_whose_every_arrival_another_process_reads(barrier, worker, tmp_path):
    """The launch looks for its file: it needs no word of it."""
    eventually((tmp_path / "worker-0.jsonl.arrived").exists, "the worker's file")
    barrier.run_due(barrier.deadline)
    assert worker.wait(20) == 0


@pytest.mark.skipif(not is_linux(), reason="needs /proc")
def test_arrivals_that_cannot_be_read_are_an_error(barrier):
    """As those behind a spliced page of a broken disk; here it is memory that is no one's."""
    unreadable = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(unreadable, barrier.fd)
    os.close(unreadable)
    with pytest.raises(LaunchError, match="start barrier"):
        barrier.serve(0)


def test_a_gate_that_another_process_keeps_open_holds_no_worker(barrier, worker, tmp_path):
    kept = os.open(tmp_path / "gate", os.O_RDWR)
    assert has_arrival(barrier)
    os.read(barrier.fd, 100)
    assert has_arrival(barrier)  # The second one comes from the gate.
    barrier.serve(0)
    assert worker.wait(20) == 0
    os.close(kept)
