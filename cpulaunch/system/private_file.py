"""Text files of this user's caches: trusted only if no other user can write them, and always replaced as a whole.

Every function takes a path, or a name in the folder that the descriptor `folder` refers to.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def is_private(status: os.stat_result) -> bool:
    """Whether this user owns a file or folder and no other user can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_lines(name: str, *, header: str, max_bytes: int, folder: int | None = None) -> list[str]:
    """The complete lines below the header; none if the file is not private, is larger, or has another header."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except (OSError, ValueError):
        return []
    try:
        status = os.fstat(fd)
        trusted = stat.S_ISREG(status.st_mode) and is_private(status)
        data = _read(fd, max_bytes + 1) if trusted else b""
    except OSError:
        return []
    finally:
        os.close(fd)
    found, *lines = data.decode("utf-8", "replace").split("\n")
    return lines[:-1] if found == header and len(data) <= max_bytes else []


def _read(fd: int, limit: int) -> bytes:
    data = b""
    while chunk := os.read(fd, limit - len(data)):
        data += chunk
    return data


def replace_lines(name: str, lines: Iterable[str], *, header: str, folder: int | None = None) -> None:
    """Effect: replaces the file atomically by one with these lines below the header; does nothing if that fails.

    The temporary file has an unpredictable name: processes of several containers that share the folder may have the
    same process id.
    """
    data = "\n".join([header, *lines, ""]).encode("utf-8", "backslashreplace")
    temporary = f"{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    except (OSError, ValueError):
        return
    try:
        _write(fd, data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        _remove(temporary, folder)


def _write(fd: int, data: bytes) -> None:
    """Effect: writes the data and closes the file. Raises: OSError, on network file systems when it is closed."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def _remove(name: str, folder: int | None) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return
