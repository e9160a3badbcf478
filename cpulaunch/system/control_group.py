"""A cgroup of version 2 for everything that one launch starts, so that the kernel can end all of it at once.

Made where this process may make one in its own cgroup: as root, in a delegated cgroup, under `systemd-run --user`.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst; cgroup.kill exists since Linux 5.14.
"""

from __future__ import annotations

import os
import select
import time

from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.process_state import PARENT, stat_field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where systemd mounts version 2: alone, or beside version 1."""

PREFIX = "cpulaunch-"
MOST_GUARDS = 3
"""Above the supervisor, each the parent of the next one."""

REMOVAL_SECONDS = 2.0
"""How long killed processes may take to leave a cgroup; a process that the kernel cannot interrupt takes longer."""

FIRST_PAUSE_SECONDS = 0.001
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def choose_cgroup(proc: str = "/proc", mounts: tuple[str, ...] = MOUNTS) -> str | None:
    """The path, with a random name, of a cgroup that `make_cgroup` can make later; None where it may not."""
    own = _own_cgroup(proc, mounts)
    try:
        # A name tells the namespace: the lock of a cgroup is seen only by processes of the same one.
        return None if own is None else f"{own}/{_prefix(proc)}{os.urandom(6).hex()}"
    except OSError:
        return None


def _prefix(proc: str) -> str:
    return f"{PREFIX}{os.stat(f'{proc}/self/ns/cgroup').st_ino:x}-"


def _own_cgroup(proc: str, mounts: tuple[str, ...]) -> str | None:
    """The directory of this process's own cgroup of version 2, if it may move processes and make cgroups there."""
    for path in _cgroup_paths("self", proc, mounts):
        if os.access(f"{path}/cgroup.procs", os.W_OK) and os.access(path, os.W_OK | os.X_OK):
            # In a container the same name may stand for another cgroup, that of the host.
            return path if str(os.getpid()) in _read(f"{path}/cgroup.procs").split() else None
    return None


def _cgroup_paths(process: int | str, proc: str, mounts: tuple[str, ...]) -> list[str]:
    """Where the directory of the process's cgroup of version 2 can be; none if that is outside this namespace's."""
    lines = _read(f"{proc}/{process}/cgroup").split("\n")
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None or "/.." in name:
        return []
    return [f"{mount}{name.rstrip('/')}" for mount in mounts]


def is_frozen(pid: int, proc: str = "/proc", mounts: tuple[str, ...] = MOUNTS) -> bool:
    """Whether the process's cgroup, or one above it, is to be frozen.

    Not whether it is, as another process there may delay that. Source: cgroup-v2.rst, cgroup.freeze.
    """
    for path, mount in zip(_cgroup_paths(pid, proc, mounts), mounts, strict=False):
        while len(path) > len(mount):
            if _read(f"{path}/cgroup.freeze").strip() == "1":
                return True
            path = os.path.dirname(path)
    return False


def make_cgroup(path: str) -> int | None:
    """The descriptor that keeps this new cgroup in use; None where it cannot be made. Effect: makes it, and locks it.

    The lock belongs to all processes that inherit the descriptor. It tells `remove_leftovers` that one of them lives.
    Other users could take it, if they could open the directory.
    """
    try:
        os.mkdir(path, 0o700)
    except OSError:
        return None
    lock = _lock(path)
    if lock is None or not os.access(f"{path}/cgroup.kill", os.W_OK):
        remove_cgroup(path)
        return None
    return lock


def _lock(path: str) -> int | None:
    """The descriptor of the locked directory; None if another process holds the lock."""
    import fcntl

    try:
        fd = os.open(path, FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def move_to_cgroup(path: str, pid: int) -> bool:
    """Whether the process is in this cgroup, and with it what it starts. Effect: moves it (0: this process)."""
    return _write(f"{path}/cgroup.procs", str(pid))


def kill_cgroup(path: str) -> None:
    """Effect: the kernel kills every process in the cgroup and below it, and what they fork meanwhile.

    But neither this process nor the guards above it: a worker of root may have moved them there.
    """
    pid: int | None = os.getpid()
    for _ in range(MOST_GUARDS + 1):
        if pid and any(f"{own}/".startswith(f"{path}/") for own in _cgroup_paths(pid, "/proc", MOUNTS)):
            move_to_cgroup(os.path.dirname(path), pid)
        pid = stat_field(pid, PARENT) if pid else None
    _write(f"{path}/cgroup.kill", "1")


def remove_cgroup(path: str, *, deadline: float | None = None) -> None:
    """Effect: the cgroup and those below it do not exist; what still runs there is killed.

    `deadline`: until when it waits for that (monotonic seconds); None: for REMOVAL_SECONDS.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS if deadline is None else deadline
    pause = FIRST_PAUSE_SECONDS
    while not _is_removed(path):
        if not _is_populated(path):  # Its last process has left meanwhile, or something is mounted there.
            _is_removed(path)
            return
        kill_cgroup(path)
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_populated(path: str) -> bool:
    """Whether processes are in the cgroup or below it, as far as can be told. Source: cgroup-v2.rst, cgroup.events."""
    return "populated 0" not in _read(f"{path}/cgroup.events").split("\n")


def _is_removed(path: str) -> bool:
    """Whether the cgroup does not exist. Effect: removes it and those below it, the lowest first, where empty."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        _remove_below(path)
        _remove_empty(path)
        return not os.path.exists(path)
    return True


def _remove_below(path: str) -> None:
    """Effect: removes the cgroups below this one, the lowest first, where empty.

    By descriptors: a worker may have made them deeper than a path may be long, or Python may call functions.
    """
    try:
        fd = os.open(path, FOLDER)
    except OSError:
        return
    names: list[str] = []
    try:
        pending = [_folders(fd)]
        while pending:
            if pending[-1]:
                name = pending[-1].pop()
                fd = _moved(fd, name)
                names.append(name)
                pending.append(_folders(fd))
                continue
            pending.pop()
            if names:
                fd = _moved(fd, "..")
                _remove_empty(names.pop(), fd)
    except OSError:
        return  # A process of another launch removes them too.
    finally:
        os.close(fd)


def _moved(fd: int, name: str) -> int:
    """A descriptor of the directory of this name in another one. Effect: closes that one's. Raises: OSError."""
    moved = os.open(name, FOLDER, dir_fd=fd)
    os.close(fd)
    return moved


def _folders(fd: int) -> list[str]:
    """The names of the directories in a directory. Raises: OSError."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _remove_empty(folder: str, parent: int | None = None) -> None:
    try:
        os.rmdir(folder, dir_fd=parent)
    except OSError:
        return


def remove_leftovers(path: str, proc: str = "/proc") -> None:
    """Effect: removes the cgroups beside this one of launches whose processes were all killed, and what runs there.

    Such a cgroup has the name that `choose_cgroup` gives in this cgroup namespace, and no process holds its lock. For
    all of them together it waits for REMOVAL_SECONDS.
    """
    parent, own = os.path.split(path)
    try:
        prefix = _prefix(proc)
        names = [name for name in os.listdir(parent) if name.startswith(prefix) and name != own]
    except OSError:
        return
    deadline = time.monotonic() + REMOVAL_SECONDS
    for name in names:
        lock = _lock(f"{parent}/{name}")
        if lock is not None:
            remove_cgroup(f"{parent}/{name}", deadline=deadline)
            os.close(lock)


class LaunchCgroup:
    """The cgroup of a launch, as its supervisor sees it, which is in the cgroup together with the workers.

    `moved`: the read end of a pipe that yields a byte once the supervisor was moved there, and ends.
    """

    def __init__(self, path: str, *, moved: int) -> None:
        self._path = path
        self._moved: int | None = moved
        self._inside = False

    def wait_until_inside(self, *, meanwhile: Callable[[], None] | None = None) -> None:
        """Effect: returns once this process is in the cgroup, or cannot be. What it starts from then on is there.

        `meanwhile`: called if it is not there yet, as the kernel may take 15 milliseconds to move a process.
        """
        if self._moved is not None:
            if meanwhile is not None and not _is_readable(self._moved):
                meanwhile()
            told = bool(os.read(self._moved, 1))
            # Not told by a guard that was killed: it may have moved this process before, and `remove` must know.
            self._inside = told or move_to_cgroup(self._path, 0)
            os.close(self._moved)
            self._moved = None

    def kill_others(self) -> None:
        """Effect: kills every other process in the cgroup."""
        if self._inside and move_to_cgroup(os.path.dirname(self._path), 0):
            kill_cgroup(self._path)
            self._inside = move_to_cgroup(self._path, 0)

    def remove(self) -> None:
        """Effect: this process leaves the cgroup, and the cgroup does not exist: for when no guard is left."""
        self.wait_until_inside()
        if not self._inside or move_to_cgroup(os.path.dirname(self._path), 0):
            self._inside = False
            remove_cgroup(self._path)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _read(path: str) -> str:
    try:
        return os.fsdecode(read_proc(path))
    except OSError:
        return ""


def _write(path: str, text: str) -> bool:
    """Whether the file took the text."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)  # A worker of root may have put anything there.
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
