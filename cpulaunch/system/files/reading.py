"""Files that any process may have written or replaced: regular ones only, of bounded size, read without waiting.

Every function takes a path, or a name in the folder that the descriptor `folder` refers to.
"""

from __future__ import annotations

import errno
import os
import stat


def open_regular(name: str, *, folder: int | None = None) -> int:
    """A descriptor for reading a regular file, opened without following a link. Raises: OSError.

    Without O_NONBLOCK, the open of a named pipe would wait for its writer.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", name)


def read_start(name: str, *, max_bytes: int, folder: int | None = None) -> bytes:
    """The first bytes of a regular file. Raises: OSError."""
    fd = open_regular(name, folder=folder)
    try:
        return read_from(fd, max_bytes)
    finally:
        os.close(fd)


def read_end(name: str, *, max_bytes: int, folder: int | None = None) -> bytes:
    """The last bytes of a regular file. Raises: OSError."""
    fd = open_regular(name, folder=folder)
    try:
        os.lseek(fd, max(0, os.fstat(fd).st_size - max_bytes), os.SEEK_SET)
        return read_from(fd, max_bytes)
    finally:
        os.close(fd)


def read_lines_at_ends(name: str, *, max_bytes: int, folder: int | None = None) -> tuple[list[str], int]:
    """The lines of a regular file, and how many bytes were not read: those in the middle of a larger file.

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
        return [*_lines(first), *_lines(last)], size - len(first) - len(last)
    finally:
        os.close(fd)


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").split("\n")


def read_from(fd: int, max_bytes: int) -> bytes:
    """What a descriptor of a regular file yields from its position on, at most so many bytes. Raises: OSError."""
    parts = []
    while max_bytes > 0 and (part := os.read(fd, min(max_bytes, 1 << 20))):
        parts.append(part)
        max_bytes -= len(part)
    return b"".join(parts)
