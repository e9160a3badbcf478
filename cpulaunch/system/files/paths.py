"""Whose links are followed on the way to a file or folder, and whose files a name stands for.

Source: Linux, Documentation/admin-guide/sysctl/fs.rst, protected_symlinks, which protects world-writable folders only.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.records.record import record
from cpulaunch.system.files.owners import (
    PATH_ONLY,
    WRITABLE_BY_OTHERS,
    count_link,
    have_one_owner,
    is_of_only_owner,
    is_trusted_in,
    is_unmapped,
    open_path,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = (PATH_ONLY or os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


@record(kw_only=False)
class Place:
    """A descriptor of a folder and a name in it. `is_proc`: a link of /proc, which only the kernel can follow."""

    folder: int
    name: str
    is_proc: bool


def is_of_current_folder(name: str) -> bool:
    """Whether what has this name in the current folder may be run by its name alone. Raises: OSError.

    In a folder that, by its mode, only its owner can write, it may: that owner put it there. In one where others can
    give names to this user's files, it may not. In another one, this user, root or the folder's owner must own it, or
    the link; where others may write, as in /tmp, it must neither be what another user may have linked there, nor a file
    that everyone may write.
    """
    from cpulaunch.system.files.trust import renamer  # Here and below: most names and links need none of it.

    folder = os.open(".", FOLDER)
    try:
        status, parent = os.lstat(name), os.fstat(folder)
        if not parent.st_mode & WRITABLE_BY_OTHERS:  # An ACL that lets others write shows as the group's.
            return True
        is_writable = bool(parent.st_mode & status.st_mode & stat.S_IWOTH) and stat.S_ISREG(status.st_mode)
        is_renamed = not parent.st_mode & stat.S_ISVTX and renamer(folder) is not None
        if is_writable or is_renamed or may_be_strangers_name(status, folder):
            return False
        return is_trusted_in(status, folder) or have_one_owner(status, parent)
    finally:
        os.close(folder)


def may_be_strangers_name(status: os.stat_result, folder: int) -> bool:
    """Whether this name of a file, link, pipe or device may be a hard link that another user made in an open folder.

    A hard link shows the owner of the original. Source: proc(5), fs.protected_hardlinks: where it is 1, users link only
    what they own, or regular files that they may write. Raises: OSError.
    """
    if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
        return False
    from cpulaunch.system.files.trust import maker

    return maker(folder) is not None


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
    """What a link refers to. Raises: PermissionError if another user made it, may have given it this name, or mounted
    the file system that it is in.

    On the way to a folder, links of a folder's only owner are followed too, as administrators make them who are not
    root; but not by root. Where root has no number, they may be root's, and those in "/" and /dev are.
    """
    status, parent = os.fstat(link), os.fstat(folder)
    followed = is_of_only_owner(status, parent) and _is_followed(status, parent, is_last=is_last)
    if not (followed or is_trusted_in(status, folder)):
        raise PermissionError(errno.EPERM, f"{name} is a symbolic link of another user (uid {status.st_uid})", name)
    if not followed and (reason := _namer(status, folder, is_last=is_last)) is not None:
        raise PermissionError(errno.EPERM, f"{name} is a symbolic link {reason}", name)
    if (reason := _other_mounter(link, status)) is not None:
        raise PermissionError(errno.EPERM, f"{name} is a symbolic link that {reason}", name)
    return os.readlink("", dir_fd=link)


def _namer(status: os.stat_result, folder: int, *, is_last: bool) -> str | None:
    """Why another user may have given a link of a trusted owner its name, as text; None if none may have."""
    from cpulaunch.system.files.trust import renamer

    is_checked = is_last or os.geteuid() == 0 or os.fstat(folder).st_mode & WRITABLE_BY_OTHERS
    if is_checked and (reason := renamer(folder, users_group=not is_last)) is not None:
        return f"that others can rename: the folder that it is in {reason}"
    return "with several names, where others may write" if may_be_strangers_name(status, folder) else None


def _other_mounter(link: int, status: os.stat_result) -> str | None:
    if status.st_dev == os.stat("/").st_dev:
        return None
    from cpulaunch.system.files.mounts import other_mounter  # Most links are on the first file system.

    return other_mounter(link)


def _is_followed(link: os.stat_result, parent: os.stat_result, *, is_last: bool) -> bool:
    """Whether a link of its folder's only owner is followed."""
    if not is_unmapped(link.st_uid):
        return not is_last and os.geteuid() != 0
    return not is_last or any(os.path.samestat(parent, os.stat(folder)) for folder in ("/", "/dev"))


def _is_proc(folder: int) -> bool:
    try:
        return os.fstat(folder).st_dev == os.stat("/proc/self").st_dev
    except FileNotFoundError:
        return False
