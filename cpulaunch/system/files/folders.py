"""Private folders: made with unpredictable names, and removed through descriptors, whatever others put in their place.

A name refers to an entry of the folder that the descriptor `folder` refers to.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from itertools import islice

if sys.platform != "win32":  # The worker's package is imported there too.
    import fcntl

from cpulaunch.system.files.owners import is_own, is_unmapped
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.reading import open_here, open_regular
from cpulaunch.system.files.trust import insecure_part, lets_others_make
from cpulaunch.system.files.writing import create, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
GET_FLAGS, SET_FLAGS, KEPT_FLAGS = 0x80086601, 0x40086602, 0x10 | 0x20
"""Source: Linux, include/uapi/linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL and FS_APPEND_FL."""

REMOVAL_SECONDS = 10.0
"""How long to remove the folders in a folder: while another process of this user makes new ones, there is no end."""

NAMES_AT_ONCE = 1 << 14
"""Listed before these are removed: a folder may have millions, of which one takes half a KiB of memory."""


def unpredictable(prefix: str) -> str:
    """A name that no other process has used or can guess."""
    return prefix + os.urandom(6).hex()


def make_folder(name: str, *, folder: int | None = None) -> int:
    """A descriptor of a new, empty folder that only its owner can read. Raises: OSError.

    Another user may have put an older folder of this user in its place, one that others may write.
    """
    os.mkdir(name, 0o700, dir_fd=folder)
    fd = open_private(name, folder=folder)
    try:
        with os.scandir(fd) as entries:
            found = next(entries, None)
        if found is not None:
            raise FileExistsError(errno.EEXIST, "it was replaced by a folder that is not empty", name)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_private(name: str, *, folder: int | None = None) -> int:
    """A descriptor of a folder that `make_folder` made. Raises: OSError, also if other users may use it."""
    fd = open_own(name, folder=folder)
    try:
        if os.fstat(fd).st_mode & FOR_OTHERS and not _of_new_file(fd).st_mode & FOR_OTHERS:
            raise PermissionError(errno.EPERM, "it was replaced by a folder that other users may use", name)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_own(name: str, *, folder: int | None = None) -> int:
    """A descriptor of a folder that this user made. Raises: OSError, if it is a link or another user's."""
    fd = os.open(name, OPENED, dir_fd=folder)
    try:
        if not is_own_in(fd, fd):
            raise PermissionError(errno.EPERM, "it was replaced by a folder of another user", name)
    except OSError:
        os.close(fd)
        raise
    return fd


NO_MODES = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS)
"""Of file systems whose modes are fixed, or that have none."""


def close_to_others(folder: int) -> bool:
    """Whether only its owner can enter the opened folder. Raises: OSError.

    Effect: makes it so, except where the mount fixes all modes, as that of vfat does.
    """
    if os.fstat(folder).st_mode & FOR_OTHERS:
        try:
            os.fchmod(folder, 0o700)
        except OSError as error:
            if error.errno not in NO_MODES:
                raise
            return False
    return True


def is_own_in(fd: int, folder: int) -> bool:
    """Whether what was opened belongs to this user, or to the user as whom this opened folder stores this user's files.

    That is another one where a share of NFS or CIFS maps users.
    """
    status = os.fstat(fd)
    if (owner := status.st_uid) == os.geteuid():
        return is_unmapped(owner) or is_own(status, fd)
    try:
        return owner == _of_new_file(folder).st_uid
    except OSError:
        return False


def owner_of_new_files(folder: int) -> int:
    """The user id of the owner of what this user makes in an opened folder: another one where a share maps users.

    Effect: makes a file, and removes it. Raises: OSError.
    """
    return _of_new_file(folder).st_uid


def _of_new_file(folder: int) -> os.stat_result:
    """The status of a private file in the folder: a file system may keep no owners or modes, as of CIFS.

    Effect: makes it, and removes it. Raises: OSError.
    """
    name = unpredictable(".owner-")
    fd = create(name, folder=folder)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        remove(name, folder=folder)


def remove_path(path: str) -> None:
    """Effect: removes this user's folder and what is in it, as far as permissions allow."""
    parent, name = os.path.split(path)
    try:
        folder = open_folder(parent)
    except OSError:
        return
    remove_folder(name, folder=folder)
    os.close(folder)


def remove_renamed(fd: int, *, path: str) -> None:
    """Effect: removes this user's opened folder, which had this path, as `remove_path` does, under its new name.

    Nothing happens if it has kept its name, or is in another folder than before. Linux only.
    """
    folder, old = os.path.split(path)
    try:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name == old:
            return
        parent = open_folder(folder)
    except OSError:
        return
    try:
        found = open_here(name, folder=parent, flags=os.O_DIRECTORY)
        is_same = os.path.samestat(os.fstat(found), os.fstat(fd))
        os.close(found)
        if is_same:
            remove_folder(name, folder=parent)
    except OSError:  # It is gone.
        return
    finally:
        os.close(parent)


def path_exists(path: str) -> bool:
    """Whether anything has this path; it is asked nothing, as it may be mounted. False if a folder on the way is gone.

    Takes no descriptor, as a worker may have taken away all. Source: Linux, fs/stat.c, do_readlinkat.
    """
    try:
        os.readlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # EINVAL: it is no link.
        return True
    return True


def remove_folder(name: str, *, folder: int) -> None:
    """Effect: removes this user's folder and what is in it, as far as permissions allow.

    A link or a file of this user in its place is removed itself. What is mounted is not entered, nor asked anything.
    """
    try:
        fd = _open_readable(name, folder)
    except OSError:
        _remove_own(name, folder)
        return
    if is_own_in(fd, fd):
        empty_folder(fd)
        _remove_empty(name, folder)
    os.close(fd)


def _remove_own(name: str, folder: int) -> None:
    """Effect: removes what has this name and is no folder, if it is this user's."""
    try:
        if _owner(name, folder) == os.geteuid():
            os.unlink(name, dir_fd=folder)
    except OSError:
        return  # Another process of this launch has removed it, or it is a mount.


def _owner(name: str, folder: int) -> int:
    """The user id of the owner of what has this name. Raises: OSError."""
    if not hasattr(os, "O_PATH"):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid
    path = open_here(name, folder=folder)
    try:
        return os.fstat(path).st_uid
    finally:
        os.close(path)


def _open_readable(name: str, folder: int) -> int:
    """A descriptor of a folder in another one. Raises: OSError, also if it is in another mount.

    A worker may have mounted what is not its own, or what never answers. Effect: if it is this user's, its owner may do
    everything in it, whatever a worker has taken away.
    """
    if not hasattr(os, "O_PATH"):
        return os.open(name, OPENED, dir_fd=folder)
    path = open_here(name, folder=folder, flags=os.O_DIRECTORY)
    try:
        status = os.fstat(path)
        if status.st_uid == os.geteuid() and status.st_mode & 0o700 != 0o700:
            _allow_all(path)
        fd = os.open(".", OPENED, dir_fd=path)
        _let_change(fd)
        return fd
    finally:
        os.close(path)


def _allow_all(path: int) -> None:
    """Effect: the owner of the folder may do everything in it. Source: open(2), O_PATH: fchmod(2) fails on these."""
    try:
        os.chmod(f"/proc/self/fd/{path}", 0o700)
    except OSError:
        return


def _let_change(fd: int) -> None:
    """Effect: what is opened can be changed and removed, if it is this user's: a worker of root may have locked it."""
    try:
        flags = int.from_bytes(fcntl.ioctl(fd, GET_FLAGS, bytes(8))[:4], sys.byteorder)
        if flags & KEPT_FLAGS and os.fstat(fd).st_uid == os.geteuid():
            fcntl.ioctl(fd, SET_FLAGS, (flags & ~KEPT_FLAGS).to_bytes(4, sys.byteorder) + bytes(4))
    except OSError:
        return  # Most file systems have none. Source: ioctl_iflags(2).


def _remove_file(name: str, folder: int) -> None:
    """Effect: removes what is no folder, a regular file also if it is locked and has no other name."""
    try:
        os.unlink(name, dir_fd=folder)
    except PermissionError:
        try:
            if hasattr(os, "O_PATH"):
                os.close(open_here(name, folder=folder))  # Raises for a mount, which is not asked anything.
            fd = open_regular(name, folder=folder)
        except OSError:
            return
        if os.fstat(fd).st_nlink == 1:
            _let_change(fd)
        os.close(fd)
        remove(name, folder=folder)
    except OSError:
        return


def remove_if_empty(path: str) -> None:
    """Effect: removes a folder that is empty."""
    _remove_empty(path, None)


def _remove_empty(name: str, folder: int | None) -> bool:
    """Whether the folder was empty. Effect: removes it then."""
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True


def empty_folder(folder: int) -> None:
    """Effect: removes what is in the folder, as far as permissions allow, and as it can be removed in some seconds.

    What is in a folder in it is moved up first, so that a few descriptors suffice for any depth.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    kept: set[str] = set()
    found = True
    while found:
        found = False
        for name in _without_rest(folder):
            if name in kept:
                continue
            found = True
            _move_up(name, folder, deadline)
            if not _remove_empty(name, folder):
                kept.add(name)
            if time.monotonic() >= deadline:
                return


def _move_up(name: str, folder: int, deadline: float) -> None:
    """Effect: the folders in a folder of this name are in the folder itself, and its files are gone; not all of them
    after the deadline.
    """
    try:
        fd = _open_readable(name, folder)
    except OSError:
        return
    for each in _without_rest(fd):
        if time.monotonic() >= deadline:
            break
        try:
            _move(each, fd, folder)
        except OSError:
            continue
    os.close(fd)


def _move(name: str, source: int, target: int) -> None:
    """Effect: a folder is in another one, under a new name. Raises: OSError."""
    moved = unpredictable("removed-")
    try:
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:  # It is written too, as its ".." changes.
        os.close(_open_readable(name, source))
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=target)


def _without_rest(folder: int) -> Iterator[str]:
    """The names of the folders in a folder that are not empty. Effect: removes everything else in it."""
    try:
        with os.scandir(folder) as entries:
            while some := list(islice(entries, NAMES_AT_ONCE)):
                for entry in some:
                    if not entry.is_dir(follow_symlinks=False):
                        _remove_file(entry.name, folder)
                    elif not _remove_empty(entry.name, folder):
                        yield entry.name
    except OSError:
        return


def make_secure_folder(path: str, *, users_group: bool = False) -> str:
    """The path without links of this folder, which no other user can change, and in which none can make anything: for
    libraries that open files by paths.

    `users_group`: as for `insecure_part`. Effect: makes it, if it is missing, so that only this user can read it.
    Raises: OSError, if others can change the path, before anything is made.
    """
    real = os.path.realpath(path)
    while not os.path.lexists(real):
        real = os.path.dirname(real)
    _check(insecure_part(real, users_group=users_group), path)
    folder = open_folder(path, make=0o700)
    try:
        real, status = os.path.realpath(path), os.fstat(folder)
        _check(insecure_part(real, users_group=users_group), path)
        shared = lets_others_make(real, status, users_group=users_group)
        _check(f"{real} may be written by others" if shared else None, path)
        if os.path.samestat(status, os.lstat(real)):
            return real
    finally:
        os.close(folder)
    raise PermissionError(errno.EPERM, "it was replaced meanwhile", path)


def _check(reason: str | None, path: str) -> None:
    if reason is not None:
        raise PermissionError(errno.EPERM, f"{reason}, so that other users can change it", path)
