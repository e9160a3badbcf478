"""A worker of root mounts what never answers over a folder that the end of its launch needs."""

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from cpulaunch.system.control_group import MOUNTS
from tests.launch.launching import alive, eventually, python
from tests.launch.process.killing import chain
from tests.launch.process.test_hostile_workers import GRACE

pytestmark = pytest.mark.root

PLACES = {"processes": "/proc", "shared memory": "/dev/shm", "run directory": None, "cgroups": None}
NO_FUSE = 77
MOUNTING = """
    import ctypes, os, socket, sys, time
    point, held = sys.argv[1:]
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        sys.exit(77)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        holder.connect(held)
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if ctypes.CDLL(None).mount(b"unanswered", os.fsencode(point), b"fuse", 0, options.encode()):
            sys.exit(77)
        socket.send_fds(holder, [b"mounted"], [fd])
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A socket to which a worker sends the server's end of its file system, which then outlives the worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "holder"))
        yield receiver


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_ends_a_launch_beside_what_never_answers(launcher, holder, namespaces, place):
    with tempfile.TemporaryDirectory(prefix="cpulaunch-test-") as folder:
        point = {**PLACES, "run directory": folder, "cgroups": cgroup_mount()}[place]
        if point is None:
            pytest.skip("no cgroups of version 2")
        process = launcher.start(
            python(MOUNTING, point, holder.getsockname()),
            prefix=("unshare", "--mount"),
            env={"TMPDIR": folder},
            grace_seconds=GRACE,
            report="report.json",
        )
        _, (server,), _, _ = receive(holder, process)
        try:
            pids = chain(process.pid)
            eventually(lambda: has_ended(process), "the end of the launch")
            assert process.returncode == 128 + signal.SIGTERM
            eventually(lambda: not any(map(alive, filter(None, pids.values()))), "the end of the launch")
        finally:
            os.close(server)
        assert os.listdir(folder) == []


def cgroup_mount():
    return next((mount for mount in MOUNTS if Path(mount, "cgroup.procs").exists()), None)


def has_ended(process):
    """Whether the launch has ended. Effect: sends SIGTERM, as a second one keeps reports from taking a minute."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return False
    return True


def receive(holder, process):
    """What the worker sends; skips the test where it may not mount."""
    while True:
        try:
            holder.settimeout(0.2)
            return socket.recv_fds(holder, 16, 1)
        except TimeoutError:
            if process.poll() == NO_FUSE:
                pytest.skip("no FUSE here")
            assert process.poll() is None
