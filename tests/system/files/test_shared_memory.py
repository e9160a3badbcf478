"""Shared memory that a killed process left is removed; what a process of another container uses is not."""

import ctypes
import fcntl
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cpulaunch.system.files import shared_memory
from tests.opens import opens
from tests.strangers import PR_SET_DUMPABLE, UID, as_stranger, needs_root
from tests.unanswered import beside_unanswered

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
PID = 41
PIDS = frozenset({PID})
NAME = f"{PID}:{os.getuid()}:0"


@pytest.fixture
def folder():
    """A folder in shared memory, as other containers' processes see it too."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cpulaunch-test-") as folder:
        yield folder


def make(folder, name=NAME):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(bytes(mmap.PAGESIZE))
    return path


HOLD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, 0)
if sys.argv[2] == "mapped":
    os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_a_file_in_use_is_left_while_it_is_used(folder, how):
    """Its user may be in another pid namespace: the kernel counts users, not names of processes."""
    path = make(folder)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "ready\n"
    assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert os.path.exists(path)
    holder.communicate()
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert not os.path.exists(path)


LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_file_that_a_process_has_a_lease_on_is_removed_after_its_end(folder):
    path = make(folder)
    command = [sys.executable, "-c", LEASE, path]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "ready\n"
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    holder.communicate()
    assert os.path.exists(path)
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert not os.path.exists(path)


def test_a_file_that_runs_is_removed_after_its_end(folder):
    path = os.path.join(folder, NAME)
    shutil.copy("/bin/sleep", path)
    try:
        runs = subprocess.Popen([path, "1000"])
    except PermissionError:
        pytest.skip("no program runs from /dev/shm here")
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    runs.kill()
    runs.wait()
    assert os.path.exists(path)
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert not os.path.exists(path)


@needs_root
def test_a_file_without_permissions_is_removed(folder):
    """The owner cannot open it, unless it is root."""
    os.chown(folder, UID, UID)
    path = os.path.join(folder, f"{PID}:{UID}:0")

    def act():
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.chmod(make(folder, path), 0)
        assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)

    as_stranger(act)
    assert not os.path.exists(path)


def test_a_file_from_before_the_launch_is_left(folder):
    path, registered = make(folder), make(folder, f"__KMP_REGISTERED_LIB_{PID}_{os.getuid()}")
    assert shared_memory.remove_shared_memory(PIDS, since=time.time() + 1, folder=folder)
    assert os.path.exists(path)
    assert os.path.exists(registered)


def test_a_file_that_a_process_made_look_old_is_removed(folder):
    since, path = time.time(), make(folder)
    os.utime(path, (since - 9, since - 9))
    assert shared_memory.remove_shared_memory(PIDS, since=since, folder=folder)
    assert not os.path.exists(path)


def test_the_folder_is_listed_once_for_all_processes(folder, monkeypatch):
    """A worker may have made thousands of files in it, and thousands of processes may be killed at once."""
    user, listed = os.getuid(), []
    used = [f"{PID}:{user}:0", f"{PID + 1}:{user}:0", f"{PID + 1}:{user}:1", f"__KMP_REGISTERED_LIB_{PID + 2}_{user}"]
    others = [f"{PID}:{user + 1}:0", f"{PID + 3}:{user}:0", f"__KMP_REGISTERED_LIB_{PID}_{user}0", f"{PID}", "x:y"]
    for name in (*used, *others):
        make(folder, name)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert shared_memory.remove_shared_memory(frozenset(range(PID, PID + 3)), since=0, folder=folder)
    assert listed == [folder]
    assert sorted(os.listdir(folder)) == sorted(others)


@needs_root
def test_who_opens_a_file_meanwhile_sends_no_signal_that_ends_this_process(folder, monkeypatch):
    """Any user may open one that all may read; the kernel tells the holder of its lease so, by default with SIGIO."""
    path, told, plain = make(folder), [], fcntl.fcntl

    def opened_meanwhile(fd, command, argument):
        done = plain(fd, command, argument)
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            with pytest.raises(BlockingIOError):
                os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        return done

    monkeypatch.setattr(fcntl, "fcntl", opened_meanwhile)
    before = signal.signal(signal.SIGIO, lambda number, _: told.append(number))
    try:
        assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    finally:
        signal.signal(signal.SIGIO, before)
    assert not told
    assert not os.path.exists(path)


@needs_root
def test_a_file_of_another_user_is_left(folder):
    path = make(folder)
    os.chown(path, UID, UID)
    assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert os.path.exists(path)


def test_the_start_of_a_process_is_known():
    before = time.time()
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        assert before - 0.1 < shared_memory.started_at(process.pid) < time.time() + 0.1
        process.kill()
    assert shared_memory.started_at(process.pid) == 0.0


def test_a_link_is_not_followed(folder, tmp_path):
    (tmp_path / "victim").touch()
    os.symlink(tmp_path / "victim", os.path.join(folder, NAME))
    shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert (tmp_path / "victim").exists()


def names_of_a_stranger(folder, count):
    """So many names of one file, as anyone can make hundreds of thousands."""
    other = make(folder, "other")
    os.chown(other, UID, UID)
    for number in range(1000, 1000 + count):
        os.link(other, os.path.join(folder, f"{PID}:{os.getuid()}:{number}"))


@needs_root
def test_names_of_another_user_keep_no_file_from_its_removal(folder):
    names_of_a_stranger(folder, 600)
    own = [f"__KMP_REGISTERED_LIB_{PID}_{os.getuid()}", *(f"{PID}:{os.getuid()}:{each}" for each in (0, 1, 999))]
    for name in own:
        make(folder, name)
    assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert len(os.listdir(folder)) == 601


@needs_root
def test_names_of_another_user_take_no_more_than_their_time(folder, monkeypatch):
    names_of_a_stranger(folder, 600)
    usual = [f"__KMP_REGISTERED_LIB_{PID}_{os.getuid()}", *(f"{PID}:{os.getuid()}:{each}" for each in (0, 1))]
    for name in usual:
        make(folder, name)
    looked_at, open_here = [], shared_memory.open_here
    monkeypatch.setattr(shared_memory, "open_here", lambda name, **to: looked_at.append(name) or open_here(name, **to))
    clock = itertools.count()
    monkeypatch.setattr(shared_memory.time, "monotonic", lambda: next(clock) / 50)
    assert not shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert not set(usual) & set(os.listdir(folder))
    assert len(looked_at) < 70


def test_names_of_no_process_are_looked_at_for_no_more_than_their_time(folder, monkeypatch):
    for number in range(600):
        open(os.path.join(folder, f"other-{number}"), "w").close()
    monkeypatch.setattr(shared_memory, "SEARCH_SECONDS", -1.0)
    assert not shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)


def test_time_that_own_files_take_is_none_of_other_names(folder, monkeypatch):
    for number in range(100, 110):
        make(folder, f"{PID}:{os.getuid()}:{number}")
    clock = itertools.count()
    is_in_use = shared_memory.is_in_use
    monkeypatch.setattr(shared_memory, "is_in_use", lambda descriptor: next(clock) < 0 or is_in_use(descriptor))
    monkeypatch.setattr(shared_memory.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(shared_memory, "SEARCH_SECONDS", 11.0)
    assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    monkeypatch.undo()
    assert os.listdir(folder) == []


def test_usual_names_are_found_without_a_look_at_others(folder, monkeypatch):
    names = [f"__KMP_REGISTERED_LIB_{PID}_{os.getuid()}", *(f"{PID}:{os.getuid()}:{each}" for each in range(8))]
    for name in names:
        make(folder, name)
    monkeypatch.setattr(os, "scandir", None)
    monkeypatch.setattr(os, "listdir", None)
    shared_memory.remove_usual_names(PIDS, since=0, folder=folder)
    monkeypatch.undo()
    assert os.listdir(folder) == []


def test_all_files_of_this_user_are_removed_however_many(folder):
    for number in range(600):
        make(folder, f"{PID}:{os.getuid()}:{number}")
    assert shared_memory.remove_shared_memory(PIDS, since=0, folder=folder)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("make_other", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_opened(folder, make_other):
    path = os.path.join(folder, NAME)
    make_other(path)
    assert not opens(path, lambda: shared_memory.remove_shared_memory(PIDS, since=0, folder=folder))
    assert os.path.exists(path)


@needs_root
@pytest.mark.parametrize(
    ("name", "call"),
    [(NAME, f"remove_shared_memory({{{PID}}}, since=0, folder=FOLDER)"), ("other", "remove_own_shared_memory(FOLDER)")],
)
def test_a_file_of_a_mount_that_never_answers_is_left(folder, name, call):
    code = f"from cpulaunch.system.files.shared_memory import *; {call}; print('done')"
    said = beside_unanswered(make(folder, name), code.replace("FOLDER", repr(folder)))
    if said is None:
        pytest.skip("no FUSE here")
    assert said == "done\n"


def test_a_process_removes_the_names_of_what_it_has_mapped_alone(folder, monkeypatch):
    own, others = (make(folder, f"{os.getpid()}:{os.getuid()}:{number}") for number in (0, 1))
    foreign = make(folder, f"1{os.getpid()}:{os.getuid()}:0\r\n\x85")
    fds = [os.open(path, os.O_RDWR) for path in (own, foreign)]
    memory = [mmap.mmap(fd, 0) for fd in fds]
    monkeypatch.setattr(os, "listdir", None)  # Another user may have made any number of names.
    monkeypatch.setattr(os, "scandir", None)
    shared_memory.remove_own_shared_memory(folder)
    monkeypatch.undo()
    assert [os.path.exists(path) for path in (own, others, foreign)] == [False, True, True]
    for each in memory:
        each.close()
    for fd in fds:
        os.close(fd)


def test_looks_while_a_launch_goes_on_find_any_name_for_a_limited_time(folder, monkeypatch):
    """The supervisor may be killed before the end: what it has seen end then is known to no other process."""
    for function in (shared_memory.remove_shared_memory, shared_memory.remove_usual_names):
        monkeypatch.setitem(function.__kwdefaults__, "folder", folder)
    searches = shared_memory.SharedMemorySearches()
    unusual = f"{PID}:{os.getuid()}:9b8e27b6"
    path = make(folder, unusual)
    searches.remove(PIDS)
    assert not os.path.exists(path)
    assert searches._seconds < shared_memory.SEARCHES_SECONDS
    searches._seconds = 0.0
    path, usual = make(folder, unusual), make(folder)
    searches.remove(PIDS)
    assert (os.path.exists(path), os.path.exists(usual)) == (True, False)


def test_a_clock_that_is_set_back_during_a_launch_hides_no_file(folder, monkeypatch):
    monkeypatch.setitem(shared_memory.remove_shared_memory.__kwdefaults__, "folder", folder)
    hours_ahead = [1]
    searches = shared_memory.SharedMemorySearches(wall_clock=lambda: time.time() + 3600 * hours_ahead[0])
    path = make(folder)
    searches.remove(PIDS)
    assert os.path.exists(path)  # The clock of files is an hour behind.
    hours_ahead[0] = 0
    searches.remove(PIDS)
    assert not os.path.exists(path)
