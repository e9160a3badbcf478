"""A command's output, which it and processes from outside can open as this process does."""

import os
import sys
import time

import pytest

from cpulaunch.measure.child_process import ChildSetup, run_child
from cpulaunch.system.libc import is_linux

pytestmark = pytest.mark.skipif(not is_linux(), reason="pipes can be opened through /proc on Linux alone")

SETUP = ChildSetup(environ=dict(os.environ))
READ_OWN_OUTPUT = """
import os, sys, time
parent = os.getppid()
folder, own = f"/proc/{parent}/fd", os.readlink("/proc/self/fd/1")
number = next(each for each in os.listdir(folder) if os.readlink(f"{folder}/{each}") == own)
again = os.open(f"{folder}/{number}", os.O_RDONLY | os.O_NONBLOCK)
end, writes, waits = time.monotonic() + 3, 0, False
while time.monotonic() < end and not waits:
    os.write(1, b"x")
    read_at = time.perf_counter() + writes % 100 * 2e-6  # Between the other process's poll and its read.
    while time.perf_counter() < read_at:
        pass
    try:
        os.read(again, 1)
    except BlockingIOError:
        pass
    writes += 1
    time.sleep(0.0003)
    try:
        waits = open(f"/proc/{parent}/syscall").read().startswith("0 ")  # read(2) on x86.
    except OSError:  # Some kernels show it to parents alone, or to none.
        pass
time.sleep(15)
open(sys.argv[1], "w").close()
"""


def test_what_another_process_writes_to_the_output_on_and_on_does_not_hold_the_end():
    """Here the test itself does, each time that something was read."""
    end, opened = time.monotonic() + 10, []

    def write_on(data):
        if not opened:
            own = os.listdir("/proc/self/fd")
            path = next(path for number in own if is_pipe(path := f"/proc/self/fd/{number}", data.decode().strip()))
            opened.append(os.open(path, os.O_WRONLY))
        if time.monotonic() < end:
            os.write(opened[0], b"x")

    found = run_child(["readlink", "/proc/self/fd/1"], SETUP, limit_seconds=60, receive=[write_on] * 2)
    os.close(opened[0])
    assert found.exit_code == 0
    assert time.monotonic() < end


def is_pipe(path, name):
    return os.path.basename(os.path.realpath(path)) == name  # Not readlink: the folder's own descriptor is gone.


def test_a_program_that_reads_its_own_output_does_not_outlive_its_time(tmp_path):
    outlived = tmp_path / "outlived"
    assert run_child([sys.executable, "-c", READ_OWN_OUTPUT, str(outlived)], SETUP, limit_seconds=4).exit_code is None
    assert not outlived.exists()
