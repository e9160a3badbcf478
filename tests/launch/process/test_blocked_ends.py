"""A launch ends although something that it writes to or waits for is blocked for ever."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.launch.launching import alive

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

SLACK_SECONDS = 20.0
"""For a busy machine; a launch that hangs does so for minutes."""

FAILING = "import sys, time; time.sleep(0.5); sys.exit(3)"


@pytest.fixture
def started(tmp_path):
    """Starts the command on a program, with a full stderr that is not read, and ends what is left."""
    processes = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(1 << 20))
    os.set_blocking(writer, True)

    def start(code, *options):
        (tmp_path / "job.py").write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "cpulaunch", "--grace", "1", "--show", "none", "--log-dir", "logs", *options]
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        nothing = subprocess.DEVNULL
        process = subprocess.Popen([*command, "job.py"], cwd=tmp_path, env=environ, stdin=nothing, stderr=writer)
        processes.append(process)
        return process

    yield start
    os.close(reader)
    os.close(writer)
    for process in processes:
        process.kill()
        process.wait()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def test_a_signal_ends_a_launch_whose_messages_are_not_read(started):
    launch = started(FAILING)
    with pytest.raises(subprocess.TimeoutExpired):  # The supervisor has to say which worker failed.
        launch.wait(timeout=2)
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(timeout=SLACK_SECONDS) == 128 + signal.SIGTERM


def test_nothing_is_left_of_a_killed_launch_whose_messages_are_not_read(started):
    launch = started(FAILING)
    time.sleep(2)
    (inner,) = children(launch.pid)
    left = [inner, *children(inner)]
    launch.kill()
    deadline = time.monotonic() + SLACK_SECONDS
    while any(map(alive, left)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, left))
