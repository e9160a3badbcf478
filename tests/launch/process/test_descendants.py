"""Which processes are descendants, from tables, and that they are killed."""

import os
import subprocess

import pytest

from cpulaunch.launch.process.descendants import Seen, descendants
from tests.launch.launching import python

OWN = os.getpid()


@pytest.mark.parametrize(
    ("processes", "spared", "expected"),
    [
        ({}, (), set()),
        ({7: Seen(OWN, 10), 8: Seen(7, 11), 9: Seen(1, 12)}, (), {7, 8}),
        ({7: Seen(OWN, 10), 8: Seen(7, 11), 9: Seen(OWN, 12)}, (7,), {9}),
        ({7: Seen(OWN, 10), 8: Seen(7, 9)}, (), {7}),  # Older than its parent: that was another process.
        ({7: Seen(OWN, 10), 8: Seen(9, 10), 9: Seen(8, 10)}, (), {7}),
        ({7: Seen(8, 10), 8: Seen(7, 10)}, (), set()),  # Read at different times.
    ],
)
def test_the_descendants_are_found(processes, spared, expected):
    assert set(descendants(processes, frozenset(spared))) == expected


def test_a_long_chain_takes_no_recursion():
    chain = {OWN + number: Seen(OWN + number - 1, number) for number in range(1, 5000)}
    assert len(descendants(chain, frozenset())) == 4999


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd")
def test_children_and_their_children_are_killed_and_no_others():
    code = """
    import os, time
    from cpulaunch.launch.process.descendants import kill_descendants
    from cpulaunch.system.libc import adopt_orphans
    adopt_orphans()
    spared = os.fork()
    if spared == 0:
        time.sleep(600)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
        time.sleep(600)
    time.sleep(0.2)
    kill_descendants(frozenset({spared}))
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)], os.waitpid(spared, os.WNOHANG))
    os.kill(spared, 9)
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[-9, -9] (0, 0)"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_shared_memory_is_listed_once_for_many_killed_children():
    code = """
    import os, signal, sys
    from cpulaunch.launch.process.processes import kill_children
    for _ in range(20):
        if os.fork() == 0:
            signal.pause()
    listed = []
    sys.addaudithook(lambda event, names: event == "os.listdir" and listed.append(names[0]))
    kill_children()
    print(listed.count("/dev/shm") < 5)
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
