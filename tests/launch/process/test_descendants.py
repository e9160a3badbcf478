"""Which processes are descendants, from tables, and that they are killed."""

import os
import subprocess

import pytest

from cpulaunch.launch.process.descendants import Seen, _run_directories, descendants
from tests.launch.launching import python
from tests.launch.process.test_hostile_workers import WITHOUT_PROC

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
    read, write = os.pipe()
    spared = os.fork()
    if spared == 0:
        time.sleep(600)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, b"1")
        time.sleep(600)
    os.read(read, 1)
    kill_descendants(frozenset({spared}))
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)], os.waitpid(spared, os.WNOHANG))
    os.kill(spared, 9)
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[-9, -9] (0, 0)"


GARBAGE = """
    import os, pathlib, signal
    from cpulaunch.launch.process.descendants import kill_descendants
    from cpulaunch.launch.process.processes import kill_children
    from cpulaunch.launch.process.watchdog import FailureWatch
    def put(path, content):
        os.makedirs(os.path.dirname(path))
        pathlib.Path(path).write_bytes(content)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pause()
    os.symlink(str(own), "/proc/self")
    for pid in (own, child):
        put(f"/proc/{pid}/task/{pid}/children", CONTENT)
    for name in (own, child, 10**20, "\\u00b2"):
        put(f"/proc/{name}/new/stat", b"1 (x) Z %d %d " % (own, child) + CONTENT)
        os.rename(f"/proc/{name}/new/stat", f"/proc/{name}/stat")
    kill_descendants()
    print(FailureWatch(own, guards=1, grace_seconds=0).failure())
    kill_children()
    try:
        os.wait()
    except ChildProcessError:
        print("all ended")
"""


@pytest.mark.root
@pytest.mark.parametrize("kind", ["os.mkfifo(path)", "os.symlink('/dev/zero', path)"], ids=["pipe", "endless"])
def test_no_pipe_or_endless_file_in_place_of_one_of_proc_is_waited_for(namespaces, kind):
    code = GARBAGE.replace("CONTENT", "b''").replace("pathlib.Path(path).write_bytes(content)", kind)
    done = subprocess.run([*WITHOUT_PROC, *python(code)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("None\nall ended\n", "")


@pytest.mark.root
@pytest.mark.parametrize(
    "content",
    [b"x \xc2\xb2 -1 0 " + b"9" * 20, b"9" * 5000, b"1 " * 17 + b"9" * 400, b"\xff"],
    ids=["words", "a long number", "numbers", "no text"],
)
def test_whatever_is_in_place_of_proc_children_are_killed(namespaces, content):
    code = python(GARBAGE.replace("CONTENT", repr(content)))
    done = subprocess.run([*WITHOUT_PROC, *code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("None\nall ended\n", "")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_shared_memory_is_listed_once_for_many_killed_children():
    code = """
    import os, signal, sys
    from cpulaunch.launch.process.processes import kill_children
    for _ in range(20):
        if os.fork() == 0:
            signal.pause()
    listed = []
    sys.addaudithook(lambda event, names: event in ("os.listdir", "os.scandir") and listed.append(names[0]))
    kill_children()
    print(listed.count("/dev/shm"))
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"


def test_only_folders_of_the_name_are_directories_of_runs(tmp_path):
    """A worker's log may be named by the date."""
    (tmp_path / "cpulaunch-0123456789ab").mkdir()
    names = ["cpulaunch-20261128.log", "cpulaunch-202611281205"]
    opened = [os.open(tmp_path / name, os.O_CREAT) for name in names]
    opened.append(os.open(tmp_path / "cpulaunch-0123456789ab", os.O_DIRECTORY))
    try:
        assert _run_directories(os.getpid()) == {str(tmp_path / "cpulaunch-0123456789ab")}
    finally:
        for fd in opened:
            os.close(fd)
