"""Whose links are followed, and which folders no other user can change.

Trusted owners are this user, root, and the owner of "/": in a user namespace, root's files have another number. Where
that is the number of all users without one, as in a namespace that `unshare -r` made, it tells root from no stranger.
Where this user has that number, as 65534 in a container, the kernel tells which files are this user's.
Source: Linux, Documentation/admin-guide/sysctl/fs.rst, protected_symlinks, which protects world-writable folders only.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.records.record import record
from cpulaunch.system.files.reading import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PATH_ONLY = getattr(os, "O_PATH", 0)
FOLDER = (PATH_ONLY or os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
MAX_LINKS = 40
"""Source: path_resolution(7)."""

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""With a POSIX ACL, the group's bits are its mask, which limits what any other user may do. Source: acl(5)."""

OVERFLOW_UID = 65534
"""Source: Linux, include/linux/highuid.h, DEFAULT_OVERFLOWUID."""
ALL_UIDS = (1 << 32) - 1
"""Numbers of users: the last one of 32 bits stands for none. Source: Linux, include/linux/uidgid.h."""


@record(kw_only=False)
class Place:
    """A descriptor of a folder and a name in it. `is_proc`: a link of /proc, which only the kernel can follow."""

    folder: int
    name: str
    is_proc: bool


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
    return _is_of_owner(status, parent) and is_own(parent, folder)


def have_one_owner(status: os.stat_result, other: os.stat_result) -> bool:
    """Whether one user owns both, as far as numbers tell: users who have none here show the same one."""
    uid = status.st_uid
    return uid == other.st_uid and not (is_unmapped(uid) or is_ambiguous(uid))


def is_of_current_folder(name: str) -> bool:
    """Whether what has this name in the current folder may be run by its name alone. Raises: OSError.

    In a folder that, by its mode, only its owner can write, it may: that owner put it there. In another one, this user,
    root or the folder's owner must own it, or the link; where everyone may write, as in /tmp, it must neither be what
    another user may have linked there, nor a file that everyone may write.
    """
    folder = os.open(".", FOLDER)
    try:
        status, parent = os.lstat(name), os.fstat(folder)
        if not parent.st_mode & WRITABLE_BY_OTHERS:  # An ACL that lets others write shows as the group's.
            return True
        is_writable = bool(parent.st_mode & status.st_mode & stat.S_IWOTH) and stat.S_ISREG(status.st_mode)
        if is_writable or may_be_strangers_name(status, parent):
            return False
        return is_trusted_in(status, folder) or have_one_owner(status, parent)
    finally:
        os.close(folder)


def may_be_strangers_name(status: os.stat_result, folder: os.stat_result) -> bool:
    """Whether this name of a file, link, pipe or device may be a hard link that another user made in this folder.

    A hard link shows the owner of the original. Source: proc(5), fs.protected_hardlinks: where it is 1, users link only
    what they own, or regular files that they may write.
    """
    return bool(folder.st_mode & stat.S_IWOTH) and not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1


def without_relative_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables, PYTHONPATH without the current folder: Python makes its relative and empty entries absolute.

    One that leads to this cpulaunch, which is to be found there, is kept, as an absolute path.
    """
    own = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))
    given = environ.get("PYTHONPATH")
    entries = given.split(os.pathsep) if given else []
    folders = [each if os.path.isabs(each) else own for each in entries if os.path.isabs(each) or _is_same(each, own)]
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return kept | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def _is_same(folder: str, other: str) -> bool:
    """Whether both paths lead to one folder; an empty one leads to the current folder."""
    try:
        return os.path.samefile(folder or ".", other)
    except OSError:
        return False


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


def open_folder(path: str, *, make: int | None = None, start: int | None = None) -> int:
    """A descriptor of a folder, reached through trusted links alone; relative to `start`, else the current folder.

    With `make`, effect: makes the folders that are missing, with this mode. Raises: OSError.
    """
    if not PATH_ONLY:
        if make is not None:
            os.makedirs(path, mode=make, exist_ok=True)
        return os.open(path, FOLDER, dir_fd=start)
    folder = os.open("/" if path.startswith("/") else ".", FOLDER, dir_fd=start)
    pending, links = path.split("/")[::-1], 0
    try:
        while pending:
            if (name := pending.pop()) in ("", "."):
                continue
            following, target = _step(folder, name, make=make)
            os.close(folder)
            folder = following
            if target is not None:
                links = count_link(links, name)
                pending += target.split("/")[::-1]
    except OSError as error:
        os.close(folder)
        error.filename = path
        if isinstance(error, NotADirectoryError) and make is not None and not any(pending):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        raise
    return folder


def _step(folder: int, name: str, *, make: int | None) -> tuple[int, str | None]:
    """The folder of this name; or the folder in which the target of a link of this name starts, and that target."""
    try:
        found = open_path(name, folder)
    except FileNotFoundError:
        if make is None:
            raise
        _make(name, make, folder)
        return _step(folder, name, make=None)
    try:
        status = os.fstat(found)
        if stat.S_ISDIR(status.st_mode):
            return os.dup(found), None
        if not stat.S_ISLNK(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        if _is_proc(folder):
            return os.open(name, FOLDER, dir_fd=folder), None
        target = _target(found, name, folder, is_last=False)
        return (os.open("/", FOLDER) if target.startswith("/") else os.dup(folder)), target
    finally:
        os.close(found)


def _make(name: str, mode: int, folder: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=folder)
    except FileExistsError:
        return  # Another launch made it meanwhile, as tasks of one Slurm step do that share a --log-dir.


def locate(path: str, *, start: int | None = None) -> Place:
    """Where the file of this path is or would be, reached through trusted links alone. The caller closes the folder.

    Raises: OSError.
    """
    parent, name = os.path.split(path)
    folder, links = open_folder(parent, start=start), 0
    while True:
        try:
            target, is_proc = _link_at(folder, name)
            if target is None:
                return Place(folder, name or ".", is_proc)
            links = count_link(links, name)
            parent, name = os.path.split(target)
            following = open_folder(parent, start=folder)
        except OSError:
            os.close(folder)
            raise
        os.close(folder)
        folder = following


def _link_at(folder: int, name: str) -> tuple[str | None, bool]:
    """The target of the link of this name, None if it is none; and whether it is one of /proc."""
    if not PATH_ONLY or not name:
        return None, False
    try:
        found = os.open(name, PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None, False
    try:
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            return None, False
        if _is_proc(folder):
            return None, True
        return _target(found, name, folder, is_last=True), False
    finally:
        os.close(found)


def _target(link: int, name: str, folder: int, *, is_last: bool) -> str:
    """What a link refers to. Raises: PermissionError if another user made it, or mounted the file system that it is in.

    On the way to a folder, links of a folder's only owner are followed too, as administrators make them who are not
    root; but not by root. Where root has no number, they may be root's, and those in "/" and /dev are.
    """
    status, parent = os.fstat(link), os.fstat(folder)
    followed = _is_of_owner(status, parent) and _is_followed(status, parent, is_last=is_last)
    if not (followed or is_trusted_in(status, folder)):
        raise PermissionError(errno.EPERM, f"{name} is a symbolic link of another user (uid {status.st_uid})", name)
    if may_be_strangers_name(status, parent):
        raise PermissionError(errno.EPERM, f"{name} is a link with several names, where everyone may write", name)
    if (reason := _other_mounter(link, status)) is not None:
        raise PermissionError(errno.EPERM, f"{name} is a symbolic link that {reason}", name)
    return os.readlink("", dir_fd=link)


def _other_mounter(link: int, status: os.stat_result) -> str | None:
    if status.st_dev == os.stat("/").st_dev:
        return None
    from cpulaunch.system.files.mounts import other_mounter  # Most links are on the first file system.

    return other_mounter(link)


def _is_of_owner(link: os.stat_result, parent: os.stat_result) -> bool:
    """Whether the owner of the link is the only one who can make links in its folder."""
    return link.st_uid == parent.st_uid and not parent.st_mode & WRITABLE_BY_OTHERS


def _is_followed(link: os.stat_result, parent: os.stat_result, *, is_last: bool) -> bool:
    """Whether a link of its folder's only owner is followed."""
    if not is_unmapped(link.st_uid):
        return not is_last and os.geteuid() != 0
    return not is_last or any(os.path.samestat(parent, os.stat(folder)) for folder in ("/", "/dev"))


def count_link(links: int, name: str) -> int:
    """One more than the links that were followed on the way to a path. Raises: OSError if these are too many."""
    if links >= MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    return links + 1


def _is_proc(folder: int) -> bool:
    try:
        return os.fstat(folder).st_dev == os.stat("/proc/self").st_dev
    except FileNotFoundError:
        return False


def open_path(name: str, folder: int | None = None) -> int:
    """A descriptor of what has this name, of links themselves. Raises: OSError.

    Of an automount point, O_PATH alone opens the folder below what is mounted. Source: open(2), O_DIRECTORY.
    """
    flags = PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=folder)
