"""Files that any process may have written or replaced: regular ones only, of bounded size, read without waiting.

Every function takes a path, or a name in the folder that the descriptor `folder` refers to.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_PROC = 1 << 24
FIRST_BYTES = 1 << 12
"""Are read first, as a process may be without memory for more (RLIMIT_AS), and most files are shorter."""
KERNEL_FILES = {0x9FA0, 0x62656572, 0x64626720, 0x74726163}
"""Of procfs, sysfs, debugfs and tracefs. Source: statfs(2), f_type."""
STATFS_BYTES = 256
"""More than any struct statfs has."""
LOST = 0o601
"""The mode of a private file to which something could not be written: one that no file system gives to all files."""


def open_regular(name: str, *, folder: int | None = None, links: bool = False) -> int:
    """A descriptor for reading a regular file, opened without following a link, unless `links` are to be followed.

    Nothing else is opened, except by O_PATH: the open of a device may have effects, and so may reading a file of the
    kernel's own file systems, to which another user's link may lead. Without O_NONBLOCK, the open of a named pipe would
    wait for its writer. Raises: OSError.
    """
    try:
        return _open_regular(name, folder, links)
    except OSError as error:
        if error.errno != errno.ESTALE:  # On NFS: another host has replaced what was looked up.
            raise
    return _open_regular(name, folder, links)


def _open_regular(name: str, folder: int | None, links: bool) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    named = 0 if links else os.O_NOFOLLOW
    found = os.open(name, getattr(os, "O_PATH", flags) | os.O_CLOEXEC | named, dir_fd=folder)
    try:
        _check_regular(found, name)
        fd = reopen(found, flags, name, folder=folder, named=named)
    finally:
        os.close(found)
    try:
        _check_regular(fd, name)  # Without /proc, another file may be there by now.
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(fd: int, name: str) -> None:
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode) or (may_be_kernels(status) and is_kernels(fd)):
        raise OSError(errno.EINVAL, "not a regular file", name)


def may_be_kernels(status: os.stat_result) -> bool:
    """Whether a file has neither blocks nor a device of its own, as those of the kernel and some empty ones."""
    return getattr(status, "st_blocks", 1) == 0 and os.major(status.st_dev) == 0


def is_kernels(fd: int) -> bool:
    """Whether an opened file is one of the kernel's own file systems, mounted anywhere; False where that is unknown."""
    try:
        import ctypes  # It takes 3 ms, and few files are asked for.

        found = ctypes.create_string_buffer(STATFS_BYTES)
        if ctypes.CDLL(None).fstatfs(fd, found):
            return False
    except (ImportError, AttributeError, OSError):
        return False
    words = (int.from_bytes(found.raw[at : at + 4], sys.byteorder) for at in (0, 4))
    return not KERNEL_FILES.isdisjoint(words)  # f_type has 4 or 8 bytes.


def open_here(name: str, *, folder: int, flags: int = 0) -> int:
    """A descriptor, by O_PATH, of what has this name in the folder, also of a link. Raises: OSError; EXDEV for a mount.

    What a worker has mounted need not be its own, and may never answer: it is asked nothing. Linux only.
    """
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        if mount_of(found) != mount_of(folder):
            raise OSError(errno.EXDEV, "it is in another mount", name)
    except OSError:
        os.close(found)
        raise
    return found


def mount_of(fd: int) -> bytes | int:
    """What tells mounts apart; without /proc, file systems. Source: proc_pid_fdinfo(5), mnt_id, Linux 3.15."""
    try:
        lines = read_proc(f"/proc/self/fdinfo/{fd}").split(b"\n")
        return next(line for line in lines if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):
        return os.fstat(fd).st_dev


def reopen(found: int, flags: int, name: str, *, folder: int | None, named: int) -> int:
    """Another descriptor of what one by O_PATH refers to; without /proc, of what has its name. Raises: OSError.

    `named`: further flags for the open by name.
    """
    try:
        return os.open(f"/proc/self/fd/{found}", flags)
    except FileNotFoundError:
        return os.open(name, flags | named, dir_fd=folder)


def read_proc(path: str, *, max_bytes: int = MAX_PROC) -> bytes:
    """The start of a file in /proc, at most 16 MiB. Raises: OSError.

    A worker of root may have put a pipe in its place, or a file without end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return read_from(fd, max_bytes)
    finally:
        os.close(fd)


def read_start(name: str, *, max_bytes: int, folder: int | None = None, links: bool = False) -> bytes:
    """The first bytes of a regular file. Raises: OSError."""
    fd = open_regular(name, folder=folder, links=links)
    try:
        return read_from(fd, max_bytes)
    finally:
        os.close(fd)


def mark_lost(name: str, *, folder: int | None = None) -> None:
    """Effect: a file of this user shows that something could not be written to it, which takes no space.

    Raises: OSError.
    """
    fd = open_regular(name, folder=folder)
    try:
        os.fchmod(fd, LOST)
    finally:
        os.close(fd)


def note_time(name: str, seconds: float, *, folder: int) -> None:
    """Effect: the file of this name in the folder was changed at this Unix time, as far as that can be noted.

    The kernel would note that of a file server's clock, where the folder is on one. Source: utimensat(2).
    """
    try:
        os.utime(name, (seconds, seconds), dir_fd=folder, follow_symlinks=False)
    except OSError:
        return


def is_marked_lost(name: str, *, folder: int | None = None) -> bool:
    """Whether something could not be written to the file of this name, as for want of space."""
    try:
        return stat.S_IMODE(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) == LOST
    except OSError:
        return False


def read_end(name: str, *, max_bytes: int, folder: int | None = None) -> bytes:
    """The last bytes of a regular file. Raises: OSError."""
    fd = open_regular(name, folder=folder)
    try:
        os.lseek(fd, max(0, os.fstat(fd).st_size - max_bytes), os.SEEK_SET)
        return read_from(fd, max_bytes)
    finally:
        os.close(fd)


def read_lines_at_ends(name: str, *, max_bytes: int, folder: int | None = None) -> tuple[Iterable[str], int]:
    """The lines of a regular file, one at a time, and how many bytes in the middle of a larger one were not read.

    Raises: OSError.
    """
    fd = open_regular(name, folder=folder)
    try:
        size = os.fstat(fd).st_size
        if size <= max_bytes:
            return _lines(read_from(fd, max_bytes)), 0
        half = max_bytes // 2
        first = read_from(fd, half).rpartition(b"\n")[0]
        os.lseek(fd, size - half, os.SEEK_SET)
        last = read_from(fd, half).partition(b"\n")[2]
        return (line for part in (first, last) for line in _lines(part)), size - len(first) - len(last)
    finally:
        os.close(fd)


def _lines(data: bytes) -> Iterator[str]:
    """The lines without their ends. A list of all would take 25 times the memory of the shortest."""
    for line in io.BytesIO(data):
        yield line.removesuffix(b"\n").decode("utf-8", "replace")


def read_from(fd: int, max_bytes: int) -> bytes:
    """What a descriptor of a regular file yields from its position on, at most so many bytes. Raises: OSError."""
    parts, most = [], FIRST_BYTES
    while max_bytes > 0 and (part := os.read(fd, min(max_bytes, most))):
        parts.append(part)
        max_bytes -= len(part)
        most = min(2 * most, 1 << 20)
    return b"".join(parts)
