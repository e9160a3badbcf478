"""Shared memory that a killed process could not remove itself.

Several containers may share /dev/shm, and a process of another one may have the same process and user id.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time

if sys.platform != "win32":  # The worker's package is imported there too.
    import fcntl

from cpulaunch.system.files.reading import open_here, read_proc, reopen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SHARED_FOLDER = "/dev/shm"
REGISTERED = "__KMP_REGISTERED_LIB_"
BUSY = (errno.EAGAIN, errno.ETXTBSY)
"""Of an open for writing: another process has a lease on the file, or runs it."""
MAX_OTHERS = 1000
"""Names of what is no file of this user's, looked at in one call: another user may have made any number of them."""
GONE_SECONDS = 1.0
"""Time in one call for looks at names that are gone: another user may make and remove any number of them."""
MAX_DIGITS = 18
"""Of a region's number: those of higher ones come last."""
TICK_SECONDS = 0.02
"""Times of files are those of the kernel's last tick, at most 10 ms ago. Source: Linux, current_time (fs/inode.c)."""


def remove_shared_memory(
    pids: Iterable[int], *, since: float, most: int | None = None, folder: str = SHARED_FOLDER
) -> frozenset[int]:
    """The processes after which files are left that are named. Effect: removes those that no process uses any more.

    They are 25 MB for each rank of oneCCL, 1 KB of Intel OpenMP. Only files that this user made after `since` (Unix
    time in seconds) are the processes'; other ranks may still use them. The folder is listed once: thousands of
    processes may have been killed, and any user may have made thousands of files in it. Of more than `most` files, the
    others are left; so are those that come after MAX_OTHERS of other users, who can take all numbers but the lowest,
    which libfabric gives first, or once looks at names that are gone by then have taken a second.
    """
    owners = frozenset(map(str, pids))
    if not owners:
        return frozenset()
    try:
        names = [(name, _owner(name)) for name in os.listdir(folder)]
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return frozenset()
    owned = sorted((_order(name), name, int(owner)) for name, owner in names if owner is not None and owner in owners)
    kept, others, left = set(), 0, GONE_SECONDS
    for _, name, owner in owned[:most]:
        begun = time.monotonic()
        try:
            is_kept = _is_kept(name, since, folder=place)
        except FileNotFoundError:  # Another process of this launch may have removed it.
            left -= time.monotonic() - begun
            if left < 0:
                break
            continue
        if is_kept:
            kept.add(owner)
        others += is_kept is None
        if others == MAX_OTHERS:
            break
    os.close(place)
    return frozenset(kept.union(owner for _, _, owner in owned[len(owned) if most is None else most :]))


def _owner(name: str) -> str | None:
    """The pid after which a process of this user has named a file; None for other files.

    Source: libfabric, whose shm provider names a region PID:UID:NUMBER; openmp/runtime/src/kmp_runtime.cpp,
    __kmp_reg_status_name.
    """
    registered = name.startswith(REGISTERED)
    pid, mark, rest = name.removeprefix(REGISTERED).partition("_" if registered else ":")
    owned = rest == str(os.getuid()) if registered else rest.startswith(f"{os.getuid()}:")
    return pid if mark and owned else None


def _order(name: str) -> int:
    """The runtime's file, of which there is one, before regions of low numbers before those of high ones."""
    if name.startswith(REGISTERED):
        return -1
    number = name.split(":", 2)[2]
    return int(number) if _is_number(number) else sys.maxsize


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and text == str(int(text))


def started_at(pid: int) -> float:
    """When a process started, in Unix seconds; 0 without /proc. Source: proc(5), /proc/pid/stat, starttime."""
    try:
        fields = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, OverflowError):
        return 0.0
    now = time.time()  # noqa: TID251 - compared with the times of files
    return now - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds


def _is_kept(name: str, since: float, *, folder: int) -> bool | None:
    """Whether a file of this user's is left because a process uses it; None if what has the name is no such file.

    Effect: removes an unused one. Raises: FileNotFoundError.
    """
    try:
        fd = _open_own(name, since, folder=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        return True if error.errno in BUSY else None
    try:
        if not _is_own(os.fstat(fd), since):
            return False
        if is_in_use(fd):
            return True
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


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
    return own and status.st_mtime >= since - TICK_SECONDS


def is_in_use(fd: int) -> bool:
    """Whether a process, also one of another container, has this file open or mapped, through another descriptor.

    The kernel grants a lease for writing to the only user of a file. Source: fcntl(2), F_SETLEASE. Where it grants none
    to anyone, the file is taken to be unused. Who opens the file meanwhile, as any user may that can read it, would end
    this process by SIGIO; SIGURG is ignored by default.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def remove_own_shared_memory(folder: str = SHARED_FOLDER) -> None:
    """Effect: removes the names of the shared memory that this process has mapped and that is named after it.

    A file of the same name in another container's /dev/shm is none of these. Source: proc(5), /proc/pid/map_files.
    """
    mark = f"{os.getpid()}:"
    mapped = _mapped_files()
    for name in filter(lambda name: name.startswith(mark), os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) in mapped:
                os.unlink(path)
        except OSError:
            continue


def _mapped_files() -> set[tuple[int, int, int]]:
    """Device numbers and inode of every file that this process has mapped. Source: proc(5), /proc/pid/maps."""
    files = set()
    with open("/proc/self/maps", "rb") as maps:  # Bytes: a name may hold what text takes for the end of a line.
        for line in maps:
            _, _, _, device, inode, *_ = line.split()
            major, _, minor = device.partition(b":")
            files.add((int(major, 16), int(minor, 16), int(inode)))
    return files
