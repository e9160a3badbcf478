"""The number of a process or group may be that of another one once the process was reaped: that one gets no signal."""

import os
import subprocess

import pytest

from tests.launch.launching import python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

LEAVES_A_MEMBER = """
    import os, signal
    from cpulaunch.launch.process.processes import signal_worker
    from cpulaunch.system.libc import adopt_orphans
    adopt_orphans()
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        member = os.fork()
        if member == 0:
            below = os.fork()
            if below:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.close(write)
                os._exit(-os.waitstatus_to_exitcode(os.wait()[1]))
            os.close(write)
            signal.pause()
        os.close(write)
        signal.pause()
    os.close(write)
    os.read(read, 1)
    print(worker, flush=True)
    input()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    signal_worker(worker, signal.SIGTERM, adopts=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_of_a_reaped_workers_group_only_what_the_worker_left_gets_a_signal():
    command = python(LEAVES_A_MEMBER)
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        group = int(supervisor.stdout.readline())
        stranger = subprocess.Popen(["sleep", "600"], process_group=group)
        try:
            assert supervisor.communicate("\n", timeout=60)[0] == "15\n", "the signal of what is below the member"
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


WITHOUT_WAITID = """
    import os, signal
    from cpulaunch.launch.process.processes import signal_worker
    del os.waitid
    stranger = os.fork()
    if stranger == 0:
        signal.pause()
    signal_worker(stranger, signal.SIGTERM, adopts=False, ended=True)
    os.kill(stranger, signal.SIGKILL)
    print(-os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_without_waitid_the_number_of_an_ended_worker_gets_no_signal():
    """As macOS before Python 3.13, where the end is known once the worker is reaped: here another process has it."""
    done = subprocess.run(python(WITHOUT_WAITID), text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == "9\n", "the signal that is not for the number of the worker"
