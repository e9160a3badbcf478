"""Whether other users can change what is at a path: by owner, mode, ACL or mount of any part of the way to it.

A part is looked at once those above it are known to be safe, so no other user can exchange what was seen. A sticky
folder is safe: others cannot replace what is there. So is one that root's group can write, or the group of its owner
alone; the group with this user's number, only where no code is loaded and no link to a file is followed.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.system.files.owners import (
    PATH_ONLY,
    WRITABLE_BY_OTHERS,
    count_link,
    is_ambiguous,
    is_trusted,
    is_unmapped,
    open_path,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_TO_OTHERS = stat.S_IXGRP | stat.S_IXOTH
FIRST_LEVEL = 2
"""More slashes than in the path of a folder in "/", and more folders than are above it."""
NFS4_ACL = "system.nfs4_acl"
"""The attribute of files of NFS version 4. Source: Linux, fs/nfs/nfs4proc.c, XATTR_NAME_NFSV4_ACL."""

Part = tuple[str, os.stat_result, bool, str | None]
"""A path without links, the status of what is there, whether this user or root owns it, and in whose file system it is,
if another user mounted that."""


def untrusted_part(path: str, *, may_be_missing: bool = False) -> str | None:
    """What on the way to code to load or run, links included, others may change, and why; None if nothing.

    What is missing, others may put there. With `may_be_missing` it is safe where they cannot, and so is what is in a
    safe folder that this user cannot enter, from which nothing is loaded.
    """
    try:
        reasons = (f"{part[0]} {reason}" for part in _parts(path) if (reason := _writer(part)) is not None)
        return next(reasons, None)
    except OSError as error:
        where, is_missing = error.filename or path, isinstance(error, FileNotFoundError)
        is_closed = isinstance(error, PermissionError)
        if may_be_missing and error.filename is not None and (is_missing or is_closed):  # Else a FUSE answers so.
            parent = os.path.dirname(where)
            if not lets_others_make(parent, os.stat(parent)):
                return None
        return f"{where} {'is missing' if is_missing else f'cannot be checked ({error.strerror})'}"
    except ValueError as error:  # It has a NUL, as a file may name it.
        return f"{path} cannot be checked ({error})"


def untrusted_folder(path: str) -> str | None:
    """As `untrusted_part`, of a folder in which others must not make files either; it may be missing."""
    if (reason := untrusted_part(path, may_be_missing=True)) is not None:
        return reason
    try:
        return f"{path} may be written by others" if lets_others_make(path, os.stat(path)) else None
    except OSError:
        return None


def untrusted_content(folder: str) -> str | None:
    """What below a folder of code others may change, and why; None if nothing.

    The way to the folder is not looked at. What this user cannot enter or find, nothing is loaded from.
    """
    try:
        known = {os.stat(folder).st_dev}
    except OSError:
        return None
    for where, folders, files in os.walk(folder):
        for path in (os.path.join(where, name) for name in (*folders, *files)):
            try:
                part = _part(path, known)
            except OSError:
                continue
            if stat.S_ISLNK(part[1].st_mode):
                reason = untrusted_part(path, may_be_missing=True)
            else:
                reason = None if (why := _writer(part)) is None else f"{path} {why}"
            if reason is not None:
                return reason
    return None


def is_secure(path: str) -> bool:
    """Whether no other user can rename or replace this folder or what is in it, itself a path without links."""
    try:
        return insecure_part(os.path.abspath(path), users_group=True) is None
    except OSError:
        return False


def insecure_part(path: str, *, users_group: bool = False) -> str | None:
    """Which folder of a path without links other users can change, and why; None if none. Raises: OSError.

    `users_group`, here and below: whether the group with this user's number is no other user, though a folder is not
    this user's: Kubernetes gives volumes to that group, in which it has all containers of a pod.

    Where root has no number, "/" and the folders in it count as root's. Below a folder that others cannot enter, the
    group's permission does not count, as a umask gives it to all that is in a home. Others' does: what is mounted from
    there elsewhere, or held by a process that was there before, they reach.
    """
    for part, closed in _folders(path):
        where, status = part[:2]
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), where)
        first_level = where.count("/") < FIRST_LEVEL
        if (reason := _writer(part, first_level=first_level, closed=closed, users_group=users_group)) is not None:
            return f"{where} {reason}"
    return None


def changeable_part(path: str, *, share: tuple[int, int] | None = None) -> str | None:
    """As `insecure_part`, of a path without links to a folder or file.

    On the `share`, the device of a file system, another number of a user stands for this one. Where root has no number,
    a folder of users who have none counts as root's. Raises: OSError.
    """
    for (where, status, trusted, mounter), closed in _folders(path):
        is_roots = stat.S_ISDIR(status.st_mode) and is_unmapped(status.st_uid)
        own = trusted or is_roots or (status.st_dev, status.st_uid) == share
        if (reason := _writer((where, status, own, mounter), closed=closed)) is not None:
            return f"{where} {reason}"
    return None


def _folders(path: str) -> Iterator[tuple[Part, bool]]:
    """The parts of a path without links, each with whether others cannot enter a folder above it."""
    closed = False
    for part in _parts(path):
        yield part, closed
        closed = closed or (part[2] and not part[1].st_mode & OPEN_TO_OTHERS)


def renamer(folder: int, *, users_group: bool = False) -> str | None:
    """Which other user or group may rename what is in an opened folder, links and files of this user too, as text.

    None if none may: so where the folder is sticky, and its owner is trusted. Raises: OSError.
    """
    part, first_level, closed = _opened(folder)
    return _writer(part, first_level=first_level, closed=closed, users_group=users_group)


def maker(folder: int) -> str | None:
    """Which other user or group may make names in an opened folder, as text; None if none may. Raises: OSError."""
    part, first_level, closed = _opened(folder)
    writer = _writer(part, first_level=first_level, closed=closed)
    return writer or _mode_writer(part[0], part[1], closed=closed)


def _opened(folder: int) -> tuple[Part, bool, bool]:
    """The part that an opened folder is, whether it is "/" or in it, and whether others cannot enter one above it.

    By descriptors alone: others may exchange what is at its path meanwhile. They count as able to enter where this user
    cannot climb to "/". Raises: OSError.
    """
    status = os.fstat(folder)
    part = f"/proc/self/fd/{folder}", status, is_trusted(status, folder), _other_mounter(folder, status, set())
    try:
        above = list(_folders_above(folder))
    except OSError:
        return part, False, False
    return part, len(above) < FIRST_LEVEL, any(above)


def _folders_above(folder: int) -> Iterator[bool]:
    """For each folder above an opened one, up to "/": whether this user or root owns it, and others cannot enter it.

    Raises: OSError, also if the way does not lead to "/", as out of a changed root directory.
    """
    here, status, top = os.dup(folder), os.fstat(folder), os.stat("/")
    try:
        while not os.path.samestat(status, top):
            above = open_path("..", here)
            os.close(here)
            here, below, status = above, status, os.fstat(above)
            if os.path.samestat(status, below):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield is_trusted(status, here) and not status.st_mode & OPEN_TO_OTHERS
    finally:
        os.close(here)


def is_reachable(path: str) -> bool:
    """Whether other users can enter this folder, so that they may read and lock files in it. Raises: OSError."""
    return all(status.st_mode & OPEN_TO_OTHERS for _, status, _, _ in _parts(path))


def secure_path(path: str, folder: int) -> str | None:
    """The path without links of the folder that was opened at `path`; None if other users can rename or replace it.

    Its descriptor tells whether they have done so since.
    """
    try:
        resolved = os.path.realpath(path)
        same = is_secure(resolved) and os.path.samestat(os.lstat(resolved), os.fstat(folder))
    except OSError:
        return None
    return resolved if same else None


def _parts(path: str) -> Iterator[Part]:
    """Each folder and link on the way to an absolute path, from "/" on, and what is at its end, links followed.

    Each is opened when it is asked for. Raises: OSError, with the path that cannot be opened.
    """
    here, pending, links, known = "/", path.split("/")[::-1], 0, set[int]()
    while True:
        part = _part(here, known)
        yield part
        if part[3] is None:
            known.add(part[1].st_dev)
        if stat.S_ISLNK(part[1].st_mode):
            links = count_link(links, here)
            target = os.readlink(here)
            pending += target.split("/")[::-1]
            here = "/" if target.startswith("/") else os.path.dirname(here)
        name = ""
        while pending and (name := pending.pop()) in ("", ".", ".."):
            here = os.path.dirname(here) if name == ".." else here
        if name in ("", ".", ".."):
            return
        here = os.path.join(here, name)


def _part(where: str, known: set[int]) -> Part:
    """What is at a path without links. No other user mounted the file systems of the known devices. Raises: OSError."""
    if not PATH_ONLY:
        status = os.lstat(where)
        return where, status, is_trusted(status), None
    fd = open_path(where)
    try:
        status = os.fstat(fd)
        trusted = is_trusted(status, fd) or _is_own_link(where, status)
        return where, status, trusted, _other_mounter(fd, status, known)
    finally:
        os.close(fd)


def _other_mounter(fd: int, status: os.stat_result, known: set[int]) -> str | None:
    """In whose file system what is opened is, as text, if another user mounted that. Raises: OSError."""
    if status.st_dev in known or status.st_dev == os.stat("/").st_dev:
        return None
    from cpulaunch.system.files.mounts import other_mounter  # Most files are on the first file system.

    return other_mounter(fd)


def _is_own_link(where: str, status: os.stat_result) -> bool:
    """Whether it is a link with this user's number, which users without one show too, in a folder closed to others."""
    is_link = stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and is_ambiguous(status.st_uid)
    return is_link and not os.stat(os.path.dirname(where)).st_mode & WRITABLE_BY_OTHERS


def _writer(part: Part, *, first_level: bool = False, closed: bool = False, users_group: bool = False) -> str | None:
    """Which other user or group may change a file, folder or link; None if none may.

    `first_level`: it is "/" or in it, and so root's where root has no number. `closed`: its group cannot reach it.
    """
    where, status, trusted, mounter = part
    if mounter is not None:
        return mounter
    if not (trusted or (first_level and is_unmapped(status.st_uid))):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return None
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return _acl_writer(where, status, group=status.st_gid, sticky=True, users_group=users_group)
    return _mode_writer(where, status, closed=closed, users_group=users_group)


def lets_others_make(where: str, folder: os.stat_result, *, users_group: bool = False) -> bool:
    """Whether others can make files in a folder that is safe because it is sticky."""
    return bool(folder.st_mode & stat.S_ISVTX) and _mode_writer(where, folder, users_group=users_group) is not None


def _mode_writer(where: str, status: os.stat_result, *, closed: bool = False, users_group: bool = False) -> str | None:
    """Which other user or group may write a file or folder, by its mode and ACL; None if none may."""
    if status.st_mode & stat.S_IWOTH:
        return "may be written by everyone"
    group = 0 if closed else status.st_gid  # Root's group is no other user.
    if status.st_mode & stat.S_IWGRP:  # Of an ACL, these bits are the mask (acl(5)): without them it grants no writing.
        from cpulaunch.system.files.acls import group_writer  # Here and below: most files need neither.

        if (reason := group_writer(where, owner=status.st_uid, group=group, users_group=users_group)) is not None:
            return reason
    return _acl_writer(where, status, group=group, users_group=users_group)


def _acl_writer(
    where: str, status: os.stat_result, *, group: int, sticky: bool = False, users_group: bool = False
) -> str | None:
    """Which other user or group an NFSv4 ACL lets write, or change the rules of a sticky folder; None if none.

    The file system of "/" has no such ACLs.
    """
    if status.st_dev == os.stat("/").st_dev or not hasattr(os, "getxattr"):
        return None
    try:
        acl = os.getxattr(where, NFS4_ACL)
    except OSError:
        return None
    from cpulaunch.system.files.acls import NFS4_RULES, NFS4_WRITES, nfs4_writer

    asked = NFS4_RULES if sticky else NFS4_WRITES
    return nfs4_writer(acl, owner=status.st_uid, group=group, asked=asked, users_group=users_group)
