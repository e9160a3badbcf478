"""A command's output, which it and processes from outside can open as this process does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpulaunch.measure.child_process import ChildSetup, run_child
from cpulaunch.system.libc import is_linux

pytestmark = pytest.mark.skipif(not is_linux(), reason="pipes can be opened through /proc on Linux alone")

SETUP = ChildSetup(environ=dict(os.environ))
FLOOD = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
told, opened = map(Path, sys.argv[1:])
end = time.monotonic() + 15
while time.monotonic() < end and not (told.exists() and told.read_text().endswith(".")):
    time.sleep(0.01)
output = os.open(f"/proc/{told.read_text()[:-1]}/fd/1", os.O_WRONLY)
opened.touch()
while time.monotonic() < end:
    os.write(output, bytes(65536))
"""
WAIT_FOR_FLOOD = """
import os, sys, time
from pathlib import Path
told, opened = map(Path, sys.argv[1:])
told.write_text(f"{os.getpid()}.")
while not opened.exists():
    time.sleep(0.01)
"""
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
    waits = open(f"/proc/{parent}/syscall").read().startswith("0 ")  # read(2) on x86.
time.sleep(15)
open(sys.argv[1], "w").close()
"""


def test_a_process_from_outside_that_writes_the_output_on_and_on_does_not_hold_the_end(tmp_path):
    paths = (str(tmp_path / "told"), str(tmp_path / "opened"))
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, *paths])
    command = [sys.executable, "-c", WAIT_FOR_FLOOD, *paths]
    found = run_child(command, SETUP, limit_seconds=60, receive=[lambda _: time.sleep(0.02)] * 2)
    assert (found.exit_code, flood.wait(60)) == (0, -signal.SIGPIPE)  # 0: all that it wrote was read.


def test_a_program_that_reads_its_own_output_does_not_outlive_its_time(tmp_path):
    outlived = tmp_path / "outlived"
    assert run_child([sys.executable, "-c", READ_OWN_OUTPUT, str(outlived)], SETUP, limit_seconds=4).exit_code is None
    assert not outlived.exists()
