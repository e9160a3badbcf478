"""Shared memory that a killed process could not remove itself.

Several containers may share /dev/shm, and a process of another one may have the same process and user id.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time

if sys.platform != "win32":  # The worker's package is imported there too.
    import fcntl
    from _signal import SIGURG  # type: ignore[import-not-found]  # `signal` itself imports enum, which takes long.

from cpulaunch.system.files.reading import open_here, read_proc, reopen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SHARED_FOLDER = "/dev/shm"
REGISTERED = "__KMP_REGISTERED_LIB_"
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
BUSY = (errno.EAGAIN, errno.ETXTBSY)
"""Of an open for writing: another process has a lease on the file, or runs it."""
FIRST_NUMBERS = 8
"""Regions of a process that are looked for by their names: libfabric gives it the lowest numbers first."""
SEARCH_SECONDS = 0.5
"""Time for other users' names: they may have made any number of them, and may make and remove them meanwhile.

Less than ANSWER_SECONDS of the watchdog, as no signal is read meanwhile.
"""
MOST_SEARCH_SECONDS, SEARCHES_SECONDS = 0.05, 1.0
"""For a look while the launch goes on, which keeps signals from being read, and for all of these."""
NAMES_AT_ONCE = 256
"""Of the folder, between two looks at the clock."""
TICK_SECONDS = 0.02
"""Times of files are those of the kernel's last tick, at most 10 ms ago. Source: Linux, current_time (fs/inode.c)."""


def remove_shared_memory(
    pids: frozenset[int], *, since: float, seconds: float | None = None, folder: str = SHARED_FOLDER
) -> bool:
    """Whether all was found. Effect: removes files named after these processes that no process uses any more.

    They are 25 MB for each rank of oneCCL, 1 KB of Intel OpenMP. Only files that this user made or changed after
    `since` (Unix time in seconds) are the processes'; other ranks may still use them. The folder is read once, name by
    name, for `seconds`; None: SEARCH_SECONDS and as long as it takes to remove files of this user's. Whatever others
    make there, the files of the usual names are removed.
    """
    if not pids:
        return True
    try:
        place = os.open(folder, FOLDER)
    except OSError:
        return True
    try:
        with os.scandir(folder) as entries:
            found = _search(
                entries,
                frozenset(map(str, pids)),
                since,
                seconds=seconds,
                place=place,
            )
    except OSError:
        found = False
    finally:
        os.close(place)
    if not found:
        remove_usual_names(pids, since=since, folder=folder)
    return found


def remove_usual_names(pids: frozenset[int], *, since: float, folder: str = SHARED_FOLDER) -> None:
    """Effect: as `remove_shared_memory`, of the names that processes usually give; the folder is not read.

    Source: libfabric, whose shm provider names a region PID:UID:NUMBER; openmp/runtime/src/kmp_runtime.cpp,
    __kmp_reg_status_name.
    """
    if not pids:
        return
    user = os.getuid()
    try:
        place = os.open(folder, FOLDER)
    except OSError:
        return
    for pid in pids:
        for name in (f"{REGISTERED}{pid}_{user}", *(f"{pid}:{user}:{number}" for number in range(FIRST_NUMBERS))):
            _remove_unused(name, since, folder=place)
    os.close(place)


class SharedMemorySearches:
    """Looks through /dev/shm while a launch goes on, which together take no more than a second."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:  # noqa: TID251 - that of files
        """The launch starts now."""
        self._seconds = SEARCHES_SECONDS
        self._wall_clock = wall_clock
        self._started, self._wall_started = time.monotonic(), wall_clock()

    @property
    def since(self) -> float:
        """The earliest time of files that were made since the launch started, in Unix seconds.

        The clock of files may have been set back since, as it is at the first contact with a time server.
        """
        return min(self._wall_started, self._wall_clock() - (time.monotonic() - self._started))

    def remove(self, pids: frozenset[int]) -> None:
        """Effect: as `remove_shared_memory`; of usual names alone once the time is used up."""
        if not pids:
            return
        since = self.since
        if self._seconds <= 0:
            remove_usual_names(pids, since=since)
        else:
            begun = time.monotonic()
            remove_shared_memory(pids, since=since, seconds=min(self._seconds, MOST_SEARCH_SECONDS))
            self._seconds -= time.monotonic() - begun


def _search(
    entries: Iterable[os.DirEntry[str]], owners: frozenset[str], since: float, *, seconds: float | None, place: int
) -> bool:
    """Whether all entries were looked at. Effect: removes those of the owners that no process uses any more."""
    user = str(os.getuid())
    deadline = time.monotonic() + (SEARCH_SECONDS if seconds is None else seconds)
    for number, entry in enumerate(entries, 1):
        owner, mark, rest = entry.name.partition(":")
        if not mark:
            owner, _, rest = entry.name.removeprefix(REGISTERED).partition("_")
        is_own = rest.startswith(f"{user}:") if mark else entry.name == f"{REGISTERED}{owner}_{user}"
        named = is_own and owner in owners
        if not named and number % NAMES_AT_ONCE:
            continue
        begun = time.monotonic()
        if begun > deadline:
            return False
        if named and _remove_unused(entry.name, since, folder=place) and seconds is None:
            deadline += time.monotonic() - begun
    return True


def started_at(pid: int) -> float:
    """When a process started, in Unix seconds; 0 without /proc. Source: proc(5), /proc/pid/stat, starttime."""
    try:
        fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, OverflowError):
        return 0.0
    now = time.time()  # noqa: TID251 - compared with the times of files
    return now - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds


def _remove_unused(name: str, since: float, *, folder: int) -> bool:
    """Whether what has the name is a file of this user's. Effect: removes it if no process uses it."""
    try:
        fd = _open_own(name, since, folder=folder)
    except OSError as error:
        return error.errno in BUSY
    try:
        if _is_own(os.fstat(fd), since) and not is_in_use(fd):
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # Another process of this launch may have removed it.
    finally:
        os.close(fd)
    return True


def _open_own(name: str, since: float, *, folder: int) -> int:
    """A descriptor of a file of this user's. Raises: OSError.

    To open another one may have effects, as that of a pipe; and what a worker has mounted there may never answer.
    """
    found = open_here(name, folder=folder)
    try:
        status = os.fstat(found)
        if not _is_own(status, since):
            raise PermissionError(errno.EPERM, "it is not a file of this user's", name)
        if status.st_mode & 0o600 != 0o600:
            os.chmod(f"/proc/self/fd/{found}", 0o600)  # Source: open(2), O_PATH: fchmod(2) fails on these.
        return reopen(found, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, name, folder=folder, named=os.O_NOFOLLOW)
    finally:
        os.close(found)


def _is_own(status: os.stat_result, since: float) -> bool:
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    # Not st_mtime, which a process may set.
    return own and status.st_ctime >= since - TICK_SECONDS


def is_in_use(fd: int) -> bool:
    """Whether a process, also one of another container, has this file open or mapped, through another descriptor.

    The kernel grants a lease for writing to the only user of a file. Source: fcntl(2), F_SETLEASE. Where it grants none
    to anyone, the file is taken to be unused. Who opens the file meanwhile, as any user may that can read it, would end
    this process by SIGIO; SIGURG is ignored by default.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def remove_own_shared_memory(folder: str = SHARED_FOLDER) -> None:
    """Effect: removes the names of the shared memory that this process has mapped and that is named after it.

    A file of the same name in another container's /dev/shm is none of these. Source: proc(5), /proc/pid/maps: device
    numbers, inode and path of every file that this process has mapped.
    """
    mark = b"%d:" % os.getpid()
    with open("/proc/self/maps", "rb") as maps:  # Bytes: a name may hold what text takes for the end of a line.
        for line in maps:
            _, _, _, device, inode, *path = line.rstrip(b"\n").split(None, 5)
            name = b"".join(path).rpartition(b"/")[2]
            if name.startswith(mark):
                _remove_mapped(os.path.join(os.fsencode(folder), name), device, int(inode))


def _remove_mapped(path: bytes, device: bytes, inode: int) -> None:
    major, _, minor = device.partition(b":")
    try:
        status = os.lstat(path)
        found = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
        if found == (int(major, 16), int(minor, 16), inode):
            os.unlink(path)
    except OSError:
        return
