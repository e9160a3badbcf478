"""Who owns a file, folder or link: this user, root, or another user.

Trusted owners are this user, root, and the owner of "/": in a user namespace, root's files have another number. Where
that is the number of all users without one, as in a namespace that `unshare -r` made, it tells root from no stranger.
Where this user has that number, as 65534 in a container, the kernel tells which files are this user's.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.system.files.reading import read_proc

PATH_ONLY = getattr(os, "O_PATH", 0)
MAX_LINKS = 40
"""Source: path_resolution(7)."""

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""With a POSIX ACL, the group's bits are its mask, which limits what any other user may do. Source: acl(5)."""

OVERFLOW_UID = 65534
"""Source: Linux, include/linux/highuid.h, DEFAULT_OVERFLOWUID."""
ALL_UIDS = (1 << 32) - 1
"""Numbers of users: the last one of 32 bits stands for none. Source: Linux, include/linux/uidgid.h."""


def is_trusted(status: os.stat_result, fd: int | None = None) -> bool:
    """Whether no other user than this one and root owns a file, folder or link; `fd`: as for `is_own`."""
    uid = status.st_uid
    return uid == 0 or is_own(status, fd) or (uid == os.stat("/").st_uid and not is_unmapped(uid))


def is_own(status: os.stat_result, fd: int | None = None) -> bool:
    """Whether this user owns a file, folder or link.

    `fd`: its descriptor, for the kernel to decide where others show the same number; without it, it is not this user's.
    """
    uid = status.st_uid
    if uid != os.geteuid() or is_unmapped(uid):
        return False
    return not is_ambiguous(uid) or (fd is not None and _opens_as_owner(status, fd))


def is_trusted_in(status: os.stat_result, folder: int) -> bool:
    """Whether no other user than this one and root owns what is in this opened folder, a link or a pipe too."""
    if is_trusted(status):
        return True
    parent = os.fstat(folder)
    return is_of_only_owner(status, parent) and is_own(parent, folder)


def is_of_only_owner(link: os.stat_result, parent: os.stat_result) -> bool:
    """Whether the owner of the link is the only one who can make links in its folder."""
    return link.st_uid == parent.st_uid and not parent.st_mode & WRITABLE_BY_OTHERS


def have_one_owner(status: os.stat_result, other: os.stat_result) -> bool:
    """Whether one user owns both, as far as numbers tell: users who have none here show the same one."""
    uid = status.st_uid
    return uid == other.st_uid and not (is_unmapped(uid) or is_ambiguous(uid))


def is_ambiguous(uid: int) -> bool:
    """Whether users who have no number in this user namespace show this one too, which another user here may have.

    Source: user_namespaces(7), /proc/PID/uid_map: first number inside, first outside, count.
    """
    if uid != OVERFLOW_UID:
        return False
    try:
        return sum(int(line.split()[2]) for line in read_proc("/proc/self/uid_map").splitlines()) < ALL_UIDS
    except (OSError, ValueError, IndexError):
        return False


def _opens_as_owner(status: os.stat_result, fd: int) -> bool:
    """Whether the kernel takes this user for the owner of a readable file or folder. Source: open(2), O_NOATIME."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return False
    flags = os.O_RDONLY | getattr(os, "O_NOATIME", 0) | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", flags))
    except OSError:
        return False
    return True


def is_unmapped(uid: int) -> bool:
    """Whether root's files show this number, and those of any stranger too, because neither has one here.

    Source: user_namespaces(7), /proc/sys/kernel/overflowuid.
    """
    if uid == 0 or uid != os.stat("/").st_uid:
        return False
    try:
        return uid == int(read_proc("/proc/sys/kernel/overflowuid"))
    except (OSError, ValueError):
        return uid == OVERFLOW_UID


def is_shared(folder: os.stat_result, fd: int | None = None) -> bool:
    """Whether other users can make, rename or remove what is in a folder; in a sticky one, their own files.

    `fd`: as for `is_own`.
    """
    return not is_trusted(folder, fd) or bool(folder.st_mode & WRITABLE_BY_OTHERS)


def count_link(links: int, name: str) -> int:
    """One more than the links that were followed on the way to a path. Raises: OSError if these are too many."""
    if links >= MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    return links + 1


def open_path(name: str, folder: int | None = None) -> int:
    """A descriptor of what has this name, of links themselves. Raises: OSError.

    Of an automount point, O_PATH alone opens the folder below what is mounted. Source: open(2), O_DIRECTORY.
    """
    flags = PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=folder)
