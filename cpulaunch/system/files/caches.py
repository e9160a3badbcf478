"""Text files of this user's caches: trusted only if no other user can write them, and always replaced as a whole.

Every function takes a path, or a name in the folder that the descriptor `folder` refers to.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.system.files.owners import WRITABLE_BY_OTHERS, is_own, is_trusted
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.reading import open_regular, read_from
from cpulaunch.system.files.writing import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def user_cache(name: str, environ: Mapping[str, str]) -> str:
    """The path of this folder in cpulaunch's caches; relative if this user has no home.

    Source: XDG Base Directory Specification.
    """
    caches = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):
        caches = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "cpulaunch", name)


def others_access(fd: int) -> str | None:
    """Why what is in an opened file or folder may be another user's, as text; None if it is this user's alone."""
    status = os.fstat(fd)
    if not is_own(status, fd):
        return "it belongs to another user"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return "other users can write to it"
    return _other_mount(fd, status)


def others_write(fd: int) -> str | None:
    """Why an opened file may have been written by another user than this one and root, as text; None if it was not.

    A group may write what its owner made so, as a umask gives it to all files.
    """
    status = os.fstat(fd)
    if not is_trusted(status, fd):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "everyone can write to it"
    return _other_mount(fd, status)


def _other_mount(fd: int, status: os.stat_result) -> str | None:
    """Which other user mounted or serves the file system of an opened file, as text; None if none does."""
    if status.st_dev == os.stat("/").st_dev:
        return None
    from cpulaunch.system.files.mounts import other_mounter  # Most caches are on the first file system.

    reason = other_mounter(fd)
    return None if reason is None else f"it {reason}"


def read_lines(name: str, *, header: str, max_bytes: int, folder: int | None = None) -> list[str]:
    """The complete lines below the header; none if the file is not private, is larger, or has another header."""
    try:
        fd = open_regular(name, folder=folder)
    except (OSError, ValueError):
        return []
    try:
        data = read_from(fd, max_bytes + 1) if others_access(fd) is None else b""
    except OSError:
        return []
    finally:
        os.close(fd)
    found, *lines = data.decode("utf-8", "replace").split("\n")
    return lines[:-1] if found == header and len(data) <= max_bytes else []


def replace_cache(path: str, lines: Iterable[str], *, header: str) -> None:
    """Effect: as `replace_lines`, and makes the folder of the file, which is reached through trusted links alone."""
    try:
        folder = open_folder(os.path.dirname(path), make=0o700)
    except (OSError, ValueError):
        return
    replace_lines(os.path.basename(path), lines, header=header, folder=folder)
    os.close(folder)


def replace_lines(name: str, lines: Iterable[str], *, header: str, folder: int | None = None) -> None:
    """Effect: replaces the file atomically by one with these lines below the header; does nothing if that fails."""
    try:
        replace(name, "\n".join([header, *lines, ""]).encode("utf-8", "backslashreplace"), folder=folder)
    except (OSError, ValueError):
        return


def open_cache_folder(path: str) -> int:
    """A descriptor of a folder, itself no link. Effect: makes it, if missing. Raises: OSError or ValueError."""
    parent = open_folder(os.path.dirname(path), make=0o700)
    name = os.path.basename(path)
    try:
        _make_missing(name, parent)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)


def open_lock_file(name: str, *, folder: int) -> int:
    """A descriptor of a private file for locks, made if it is missing. Raises: OSError."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    reason = others_access(fd)
    if reason is None:
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, reason, name)


def open_lock_beside(path: str) -> int:
    """A descriptor of a file for locks, `path` with ".lock" behind it; made if it is missing. Raises: OSError.

    Also if another user made it, as others may in a sticky folder: that user can lock it for ever.
    """
    from cpulaunch.system.files.folders import is_own_in  # Only `tune` has such a file.

    parent, name = os.path.split(path)
    lock, flags = f"{name}.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = open_folder(parent)
    try:
        try:
            return os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        except FileExistsError:
            fd = os.open(lock, flags, dir_fd=folder)  # Without O_CREAT: proc(5), fs.protected_regular.
        status = os.fstat(fd)
        if is_trusted(status, fd) or is_own_in(fd, folder):
            return fd
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{lock} beside it is a file of another user (uid {status.st_uid})", path)
    finally:
        os.close(folder)


def _make_missing(name: str, folder: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        return
