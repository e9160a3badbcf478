"""The number of a process or group may be that of another one once the process was reaped: that one gets no signal."""

import os
import signal
import subprocess

import pytest

from tests.launch.launching import python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

FORKS = """
    import os, signal
    from cpulaunch.launch.process import descendants
    from cpulaunch.launch.process.processes import signal_workers
    from cpulaunch.system.libc import adopt_orphans
    SIGNALS = {signal.SIGTERM, signal.SIGRTMIN}
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def forked():
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            os._exit(signal.sigwait(SIGNALS))
        return pid

    def print_ends(*pids):
        ends = [str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids]
        os.write(1, f"{' '.join(ends)}\\n".encode())  # At once: several processes write.
"""
"""A forked process exits with the number of the signal that it gets: the lower one, should it have both."""

ENDS = f"{signal.SIGTERM} {signal.SIGRTMIN}\n"
"""Of a process in the group, and of one that is in another."""

LEAVES_A_MEMBER = """
    adopt_orphans()
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:
            below, outside = forked(), forked()
            os.setpgid(outside, outside)
            os.write(write, b"%d" % outside)
            print_ends(below, outside)
            os._exit(0)
        signal.pause()
    outside = int(os.read(read, 20))
    print(worker, flush=True)
    input()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    signal_workers([worker], signal.SIGTERM, adopts=True)
    os.kill(outside, signal.SIGRTMIN)
    os.wait()
"""


def test_of_a_reaped_workers_group_only_what_the_worker_left_gets_a_signal():
    command = python(FORKS + LEAVES_A_MEMBER)
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        group = int(supervisor.stdout.readline())
        stranger = subprocess.Popen(["sleep", "600"], process_group=group)
        try:
            assert supervisor.communicate("\n", timeout=60)[0] == ENDS
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


CHILDREN = """
    worker, member, outside = forked(), forked(), forked()
    for pid, group in ((worker, worker), (member, worker), (outside, outside)):
        os.setpgid(pid, group)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    signal_workers([worker], signal.SIGTERM, adopts=True)
    os.kill(outside, signal.SIGRTMIN)
    print_ends(member, outside)
"""
NO_PROC = """
    descendants._processes = dict
"""
NO_PIDFDS = """
    def refused(*_):
        raise OSError(38, "as in a sandbox")
    os.pidfd_open = refused
"""


@pytest.mark.parametrize("lacks", ["", NO_PROC, NO_PIDFDS], ids=["nothing", "/proc", "pidfds"])
def test_children_in_a_reaped_workers_group_get_a_signal_whatever_the_system_lacks(lacks):
    done = subprocess.run(python(FORKS + lacks + CHILDREN), text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == ENDS


MANY_WORKERS = """
    adopt_orphans()
    looks, processes = [], descendants._processes
    descendants._processes = lambda: looks.append(1) or processes()
    read, write = os.pipe()
    workers = []
    while len(workers) < 3 and 0 not in workers:
        workers.append(os.fork())
    if 0 in workers:
        os.setpgid(0, 0)
        if os.fork() == 0:
            below = forked()
            os.write(write, b"1")
            print_ends(below)
            os._exit(0)
        signal.pause()
    for _ in workers:
        os.read(read, 1)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    signal_workers(workers, signal.SIGTERM, adopts=True)
    for _ in workers:
        os.wait()
    print(len(looks))
"""


def test_all_processes_of_the_host_are_looked_at_once_for_many_reaped_workers():
    """Another user may have started thousands of them."""
    done = subprocess.run(python(FORKS + MANY_WORKERS), text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == 3 * f"{signal.SIGTERM}\n" + "1\n"


WITHOUT_WAITID = """
    import os, signal
    from cpulaunch.launch.process.processes import signal_workers
    del os.waitid
    stranger = os.fork()
    if stranger == 0:
        signal.pause()
    signal_workers([stranger], signal.SIGTERM, adopts=False, ended=[stranger])
    os.kill(stranger, signal.SIGKILL)
    print(-os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_without_waitid_the_number_of_an_ended_worker_gets_no_signal():
    """As macOS before Python 3.13, where the end is known once the worker is reaped: here another process has it."""
    done = subprocess.run(python(WITHOUT_WAITID), text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == "9\n", "the signal that is not for the number of the worker"
