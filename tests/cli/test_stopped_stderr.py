"""Commands that measure end although their stderr is not read, which the program can bring about."""

import importlib.util
import os
import subprocess
import sys

import pytest

from cpulaunch.system.libc import is_linux
from tests.launch.launching import DEADLINE_SECONDS

needs_proc = pytest.mark.skipif(not is_linux(), reason="a process finds those above it through /proc")

KILLS_WHAT_MEASURES = """
import os, signal

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

above = [os.getppid()]
while above[-1] != int(os.environ["TEST"]):
    above.append(parent(above[-1]))
os.kill(above[-4], signal.SIGKILL)  # Above it are two guards and the test.
signal.pause()
"""
COMMANDS = {
    "compare": ("--wall-time", "python", "--threads 1", "--"),
    "diagnose": (),
    "tune": ("--wall-time", "--vary", "threads=1"),
}


@needs_proc
@pytest.mark.parametrize("command", COMMANDS)
def test_the_guard_of_a_killed_measurement_ends_although_stderr_is_full(command, tmp_path):
    """It blocks every signal while it says what was killed."""
    assert measured(command, COMMANDS[command], KILLS_WHAT_MEASURES, tmp_path) == (137, b"")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_measurement_that_fails_ends_although_stderr_is_full(command, tmp_path):
    """Its signals are blocked. `compare` warns before, of too few rounds, and says on stdout what has failed."""
    options = ("--rounds", "1") if command == "compare" else ()
    code, _ = measured(command, (*options, *COMMANDS[command]), "raise SystemExit(3)", tmp_path)
    assert code == (125 if command == "tune" else 1)


def measured(command, options, program, tmp_path):
    """The exit code and stdout of a measurement of a program, whose stderr takes nothing."""
    if command == "tune" and importlib.util.find_spec("optuna") is None:
        pytest.skip("the extra tune is not installed")
    (tmp_path / "program.py").write_text(program)
    environ = {**os.environ, "HOME": str(tmp_path), "TEST": str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", command, *options, "program.py"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=(full := full_pipe())[1],
    )
    try:
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        for fd in full:
            os.close(fd)
    return process.returncode, out


def full_pipe():
    """Both ends of a pipe that takes no more."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(1 << 12))
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write
