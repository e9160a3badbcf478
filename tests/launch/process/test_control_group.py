"""The cgroup of a launch: made where it may be, ended at once, always removed."""

import os
import signal
import subprocess
import sys

import pytest

from cpulaunch.system import control_group
from cpulaunch.system.control_group import (
    REMOVAL_SECONDS,
    LaunchCgroup,
    choose_cgroup,
    is_frozen,
    kill_cgroup,
    make_cgroup,
    move_to_cgroup,
    remove_cgroup,
    remove_leftovers,
)
from tests.launch.launching import alive, eventually, python
from tests.launch.process.killing import chain
from tests.launch.process.test_hostile_workers import DAEMON, GRACE, SAYING
from tests.strangers import as_other_user, needs_root

SLEEPER = "import time; time.sleep(600)"


@pytest.fixture
def cgroup():
    path = choose_cgroup() if sys.platform == "linux" else None
    if path is None:
        pytest.skip("no cgroup of version 2 that this process may divide")
    yield path
    remove_cgroup(path)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", SLEEPER])
    yield process
    process.kill()
    process.wait()


def test_the_kernel_ends_a_cgroup(cgroup, sleeper):
    lock = make_cgroup(cgroup)
    assert move_to_cgroup(cgroup, sleeper.pid)
    kill_cgroup(cgroup)
    assert sleeper.wait() == -signal.SIGKILL
    remove_cgroup(cgroup)
    assert not os.path.exists(cgroup)
    os.close(lock)


def test_removing_ends_what_runs_in_a_cgroup_and_below_it(cgroup, sleeper):
    os.close(make_cgroup(cgroup))
    os.mkdir(f"{cgroup}/below")
    assert move_to_cgroup(f"{cgroup}/below", sleeper.pid)
    remove_cgroup(cgroup)
    assert not os.path.exists(cgroup)
    assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.parametrize("frozen", ["", "/below"])
def test_a_process_is_frozen_with_its_cgroup_or_one_above(cgroup, sleeper, frozen):
    os.close(make_cgroup(cgroup))
    os.mkdir(f"{cgroup}/below")
    assert move_to_cgroup(f"{cgroup}/below", sleeper.pid)
    assert not is_frozen(sleeper.pid)
    with open(f"{cgroup}{frozen}/cgroup.freeze", "w") as file:
        file.write("1")
    assert is_frozen(sleeper.pid)


FREEZES_THE_GUARD = """
    import os, sys
    def parent(pid):
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    def put(name, text):
        with open(f"{sys.argv[1]}/{name}", "w") as file:
            file.write(text)
    inner = parent(os.getppid())
    for guard in (inner, parent(inner))[int(sys.argv[2]):]:
        put("cgroup.procs", str(guard))
    put("cgroup.freeze", "1")
"""


@pytest.mark.parametrize("first", [0, 1], ids=["both guards", "the outer guard"])
def test_a_guard_that_a_worker_has_frozen_goes_on(launcher, cgroup, first):
    lock = make_cgroup(cgroup)  # Held, as the launch removes what has this name and is left over.
    assert launcher.run(python(FREEZES_THE_GUARD, cgroup, str(first)), log_dir="logs").code == 0
    os.close(lock)


MOVES_THE_GUARDS = """
    def move(pid, name):
        with open(f"{sys.argv[1]}/{name}/cgroup.procs", "w") as file:
            file.write(str(pid))
    (own,) = [line[3:].strip() for line in open("/proc/self/cgroup") if line.startswith("0::")]
    supervisor = os.getppid()
    inner = parent(supervisor)
    for guard in (inner, parent(inner)):
        move(guard, os.path.basename(own))
    move(int(open("daemon").read()), "")
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(supervisor, signal.SIGKILL)", 137)])
def test_guards_that_a_worker_has_moved_into_the_cgroup_of_their_launch_do_not_end_with_it(launcher, cgroup, end, code):
    worker = python(SAYING + DAEMON + MOVES_THE_GUARDS, os.path.dirname(cgroup), end)
    process = launcher.start(worker, python(SLEEPER), grace_seconds=GRACE)
    assert process.wait(timeout=60) == code
    assert not alive(launcher.pid("daemon"))


@needs_root
def test_another_user_cannot_take_the_lock_of_a_cgroup(cgroup):
    """Such a lock says that processes of a launch live, whose cgroup then is left to them."""
    os.close(make_cgroup(cgroup))
    assert not as_other_user(lambda: os.open(cgroup, os.O_RDONLY))


def test_cgroups_that_a_worker_nested_deeper_than_a_path_is_long_are_removed(tmp_path):
    """Directories stand for cgroups, which a worker may make wherever its launch may."""
    path = tmp_path / "cpulaunch-1"
    path.mkdir()
    folder = os.open(path, os.O_RDONLY)
    for _ in range(25):
        for name in ("d" * 200, "e"):
            os.mkdir(name, dir_fd=folder)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(folder)
    remove_cgroup(str(path))
    assert not path.exists()


def test_a_supervisor_that_was_moved_by_a_killed_guard_leaves_its_cgroup_before_ending_it(cgroup):
    """The guard died before it could say that it had moved the supervisor, which ended itself with its cgroup."""
    os.close(make_cgroup(cgroup))
    code = f"""
    import os
    from cpulaunch.system.control_group import LaunchCgroup, move_to_cgroup
    moved, write = os.pipe()
    assert move_to_cgroup({cgroup!r}, 0)
    os.close(write)
    LaunchCgroup({cgroup!r}, moved=moved).remove()
    """
    assert subprocess.run(python(code), timeout=60, check=False).returncode == 0
    assert not os.path.exists(cgroup)


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_wait_for_the_cgroup_is_used(is_inside):
    moved, write = os.pipe()

    def meanwhile():
        calls.append("called")
        os.write(write, b"1")

    calls = []
    if is_inside:
        os.write(write, b"1")
    LaunchCgroup("/gone", moved=moved).wait_until_inside(meanwhile=meanwhile)
    os.close(write)
    assert calls == ([] if is_inside else ["called"])


@pytest.mark.parametrize(
    ("own", "procs"),
    [
        ("1:cpu:/\n", ""),
        ("0::/../other\n", "1\n"),
        ("0::/gone\n", "1\n"),
        ("0::/\n", "1\n"),  # This process is not there: the mount is that of another namespace.
        ("", ""),
    ],
)
def test_no_cgroup_is_made_where_this_process_is_in_none(tmp_path, own, procs):
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "cgroup").write_text("")
    (tmp_path / "self" / "cgroup").write_text(own)
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "cgroup.procs").write_text(procs)
    assert choose_cgroup(str(tmp_path), (str(tmp_path / "mount"),)) is None


def test_the_workers_are_in_a_cgroup_of_their_launch(cgroup, launcher):
    shown = "print([line[3:].strip() for line in open('/proc/self/cgroup') if line.startswith('0::')][0])"
    outcome = launcher.run(python(shown), python(shown))
    (name,) = {os.path.basename(line) for line in outcome.lines}
    assert name.startswith("cpulaunch-")
    assert not os.path.exists(f"{os.path.dirname(cgroup)}/{name}")


def test_the_next_launch_ends_what_is_left_of_one_whose_processes_were_all_killed(cgroup, launcher):
    left = "import os, sys, time; os.fork() or (os.setsid(), time.sleep(600)); time.sleep(600)"
    process = launcher.start(python(left), python(left))
    pids = eventually(lambda: all(chain(process.pid).values()) and chain(process.pid), "three processes")
    name = eventually(lambda: own_cgroup(pids["supervisor"]), "its cgroup")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert launcher.run(python("pass"), python("pass")).code == 0
    eventually(lambda: not os.path.exists(f"{os.path.dirname(cgroup)}/{name}"), "the removal")
    assert not any(map(alive, pids.values()))


class FakeTime:
    """The clock of a module, in which only sleep takes time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("events", "seconds"), [("populated 0\nfrozen 0\n", 0.0), ("populated 1\n", REMOVAL_SECONDS)])
def test_leftovers_that_cannot_be_removed_delay_a_launch_once_at_most(tmp_path, monkeypatch, events, seconds):
    """As something is mounted in them, or a process waits for a disk. Directories stand for cgroups."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "cgroup").write_text("")
    prefix = f"cpulaunch-{(tmp_path / 'self' / 'ns' / 'cgroup').stat().st_ino:x}-"
    for number in range(20):
        (tmp_path / f"{prefix}{number}").mkdir()
        (tmp_path / f"{prefix}{number}" / "cgroup.events").write_text(events)
        (tmp_path / f"{prefix}{number}" / "cgroup.kill").write_text("")
    (tmp_path / f"{prefix}empty").mkdir()
    clock = FakeTime()
    monkeypatch.setattr(control_group, "time", clock)
    remove_leftovers(str(tmp_path / f"{prefix}own"), str(tmp_path))
    assert seconds <= clock.now <= seconds + 0.1
    assert not (tmp_path / f"{prefix}empty").exists()
    kills = {kill.read_text() for kill in tmp_path.glob("*/cgroup.kill")}
    assert kills == ({"1"} if seconds else {""})


def test_a_cgroup_whose_last_process_leaves_during_the_removal_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "cgroup"
    path.mkdir()
    process = path / "process"
    process.touch()

    def leave(_):
        process.unlink()
        return False

    monkeypatch.setattr(control_group, "_is_populated", leave)
    remove_cgroup(str(path))
    assert not path.exists()


def own_cgroup(pid):
    """The name of a process's cgroup, if it is one of a launch."""
    with open(f"/proc/{pid}/cgroup") as file:
        names = [os.path.basename(line.strip()) for line in file if line.startswith("0::")]
    return next((name for name in names if name.startswith("cpulaunch-")), None)


def test_a_pipe_in_place_of_the_own_cgroup_is_not_waited_for(tmp_path):
    (tmp_path / "self").mkdir()
    os.mkfifo(tmp_path / "self" / "cgroup")
    assert choose_cgroup(str(tmp_path), (str(tmp_path),)) is None
