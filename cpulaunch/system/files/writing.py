"""Files and named pipes that are written: new ones, logs, whole replacements and single lines.

Every function takes a path, or a name in the folder that the descriptor `folder` refers to. A link is never followed,
except for logs and reports that the user names, where `system/files/paths.py` says which.
"""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.system.files.owners import PATH_ONLY, have_one_owner, is_own, is_shared, is_trusted, is_trusted_in
from cpulaunch.system.files.paths import FOLDER, Place, locate, may_be_strangers_name
from cpulaunch.system.files.special import file_id, keep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cpulaunch.system.files.special import FileId

SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Nothing is waited for: without O_NONBLOCK, the open of a named pipe would wait for its reader."""
SPECIAL = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
MAX_LINES_FILE = 1 << 30
"""A file to which lines are added grows no larger."""


def create(name: str, *, mode: int = 0o600, folder: int | None = None) -> int:
    """A descriptor of a new file. Raises: OSError, if there is anything of this name, such as a link."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode, dir_fd=folder)


def create_with(name: str, data: bytes, *, folder: int | None = None) -> None:
    """Effect: a new file holds the data. Raises: OSError."""
    _write_all(create(name, folder=folder), data)


def create_unnamed(folder: str) -> int:
    """A descriptor for reading and writing a new file that never has a name, or has lost it. Raises: OSError."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise  # Else: a file system, or a kernel, without such files. Source: open(2), O_TMPFILE.
    name = os.path.join(folder, "cpulaunch-" + os.urandom(8).hex())
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
    os.unlink(name)
    return fd


def claim_name(name: str) -> bool:
    """Whether this is the first call for the name, or no file can be made. Effect: makes an empty file."""
    try:
        os.close(create(name))
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def replace(name: str, data: bytes, *, mode: int = 0o600, folder: int | None = None, like: int | None = None) -> None:
    """Effect: replaces the file atomically by one with the data. Raises: OSError.

    `like`, a descriptor of another file: the new one gets its owner, as far as that is allowed, and its permissions,
    whatever the umask.
    """
    temporary = f"{name}.{os.urandom(8).hex()}"  # Others may write in the folder; process ids recur in containers.
    fd = create(temporary, mode=mode if like is None else 0o600, folder=folder)
    try:
        if like is not None:
            _make_alike(fd, like)
        _write_all(fd, data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        remove(temporary, folder=folder)
        raise


def _make_alike(fd: int, like: int) -> None:
    """Effect: the file has the permissions of another, and its owner and group as far as that is allowed.

    It is never set-user-ID or set-group-ID: the other file may be a stranger's, and this one root's. Where it cannot
    have the group or the ACL, every user but the owner gets what all of them had.
    """
    from cpulaunch.system.files.acls import common_permissions, read_acl, set_acl  # Few files are replaced so.

    status = os.fstat(like)
    for owner in (status.st_uid, -1):
        try:
            os.fchown(fd, owner, status.st_gid)
            break
        except OSError:  # Only root may give files away, and to an owner whom its user namespace has.
            continue
    mode, has_group = status.st_mode & 0o777, os.fstat(fd).st_gid == status.st_gid
    try:
        acl = read_acl(f"/proc/self/fd/{like}" if PATH_ONLY else like)  # Source: open(2), O_PATH.
        is_set = set_acl(fd, acl if has_group else None)  # Also instead of one that the folder gives to new files.
        common = common_permissions(acl, mode)
    except OSError:
        is_set, common = False, 0
    if not (has_group and is_set):
        mode = mode & stat.S_IRWXU | common << 3 | common
    os.fchmod(fd, mode)


def remove(name: str, *, folder: int | None = None) -> None:
    """Effect: removes a file, if there is one and permissions allow it."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return


def replace_unchanged(path: str, data: bytes, *, read: os.stat_result) -> None:
    """Effect: the regular file at a path that the user gave is replaced by one with the data, if `read` is its status.

    The new file has the owner and the permissions of `read`: what comes from a private file stays private, even if
    another user puts a file in its place meanwhile. Raises: OSError, also if the file has changed.
    """
    place = locate(path)
    try:
        if not _replace_if(place.name, data, folder=place.folder, expected=lambda it: _version(it) == _version(read)):
            raise OSError(errno.ESTALE, "it has changed since it was read", path)
    finally:
        os.close(place.folder)


def _replace_if(name: str, data: bytes, *, folder: int, expected: Callable[[os.stat_result], bool]) -> bool:
    """Whether the status of the file in the folder, itself no link, is as expected.

    Effect: if so, replaces it by one with the data and the same permissions and owner. Raises: OSError.
    """
    old = os.open(name, (PATH_ONLY or os.O_RDONLY) | SAFELY, dir_fd=folder)
    try:
        if not expected(os.fstat(old)):
            return False
        replace(name, data, folder=folder, like=old)
        return True
    finally:
        os.close(old)


def _version(status: os.stat_result) -> tuple[int, ...]:
    """What is another for another file, and after a change to the content, the owner or the mode of the same one."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def write_output(path: str, data: bytes, *, mode: int = 0o600, direct: FileId | bool | None = True) -> None:
    """Effect: the file at a path that the user gave holds the data. Raises: OSError.

    `direct`: a pipe or device there gets the data, which waits for the pipe's reader, or that one alone; else it is
    replaced too.
    """
    place = locate(path)
    try:
        special = _open_special(place, direct) if direct else None
        if special is None:
            replace(place.name, data, mode=mode, folder=place.folder)
        else:
            _write_all(special, data)
    finally:
        os.close(place.folder)


def _open_special(place: Place, wanted: FileId | bool) -> int | None:
    """A descriptor for writing to a pipe, a device or an inherited file, which waits for a pipe's reader.

    None if a regular file is in this place, or nothing, or not the one `wanted`. What is opened is what was checked,
    whatever has been put in its place: it might be another user's pipe, whose reader never comes.
    """
    if place.is_proc or not PATH_ONLY:
        status, flags = _status(place), SPECIAL if place.is_proc else SPECIAL | os.O_NOFOLLOW
        is_special = status is not None and _is_allowed_special(status, place, wanted)
        return os.open(place.name, flags, dir_fd=place.folder) if is_special else None
    try:
        found = os.open(place.name, PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.folder)
    except FileNotFoundError:
        return None
    try:
        is_special = _is_allowed_special(os.fstat(found), place, wanted)
        return os.open(f"/proc/self/fd/{found}", SPECIAL) if is_special else None
    finally:
        os.close(found)


def _is_allowed_special(status: os.stat_result, place: Place, wanted: FileId | bool = True) -> bool:
    if wanted not in (True, file_id(status)):
        return False
    if place.is_proc:
        return True
    _check_owner(status, place)
    return not stat.S_ISREG(status.st_mode)


def _status(place: Place) -> os.stat_result | None:
    """What is in this place, the file itself for a link of /proc; None if nothing is."""
    try:
        return os.stat(place.name, dir_fd=place.folder, follow_symlinks=place.is_proc)
    except FileNotFoundError:
        return None


def check_output(path: str) -> FileId | None:
    """The pipe, device or inherited file at this path, which `write_output` does not replace; None: there is none.

    Raises: OSError if it would fail for what is there now. Effect: keeps a descriptor, so that no other file gets the
    same numbers while this process lives.
    """
    place = locate(path)
    try:
        status = _status(place)
        if status is None:
            return None
        if stat.S_ISSOCK(status.st_mode):
            raise OSError(errno.ENXIO, f"{place.name} is a socket", place.name)
        if not _is_allowed_special(status, place):
            _check_replaceable(status, place)
            return None
        if PATH_ONLY and not place.is_proc:
            status = keep(place.name, PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, folder=place.folder)
        return file_id(status)
    finally:
        os.close(place.folder)


def _check_replaceable(status: os.stat_result, place: Place) -> None:
    """Raises: PermissionError if this regular file is another user's, in a sticky folder.

    The kernel permits O_NOATIME on the same terms as the removal of such a file. Source: open(2), unlink(2).
    """
    folder = os.fstat(place.folder)
    if not folder.st_mode & stat.S_ISVTX or is_own(status) or is_own(folder, place.folder):
        return
    try:
        os.close(os.open(place.name, os.O_RDONLY | getattr(os, "O_NOATIME", 0) | SAFELY, dir_fd=place.folder))
    except OSError:
        reason = f"{place.name} is another user's file in a sticky folder (uid {status.st_uid})"
        raise PermissionError(errno.EPERM, reason, place.name) from None


def open_log(name: str, *, folder: int | None = None) -> int:
    """A descriptor that appends to a log: a file, new or with content, or a named pipe with a reader.

    Raises: OSError.
    """
    place = locate(name, start=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | SAFELY
    return _open_checked(place, flags & ~os.O_NOFOLLOW if place.is_proc else flags, 0o666, name)


def reopen_log(name: str, *, folder: int | None = None) -> int:
    """As `open_log`, a file alone: what a worker puts in its place may keep the launch waiting, or be a device.

    Raises: OSError.
    """
    fd = open_log(name, folder=folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", name)


def _open_checked(place: Place, flags: int, mode: int, name: str) -> int:
    """A descriptor of the file in this place, if it is one to write to. Raises: OSError. Effect: closes the place."""
    try:
        try:
            fd, made = os.open(place.name, flags | os.O_EXCL, mode, dir_fd=place.folder), True
        except FileExistsError:
            fd, made = os.open(place.name, flags, mode, dir_fd=place.folder), False
        try:
            if not made:  # A share of NFS or CIFS may give what this process makes another owner.
                _check_log(fd, place, name)
        except OSError:
            os.close(fd)
            raise
    finally:
        os.close(place.folder)
    return fd


def _check_log(fd: int, place: Place, name: str) -> None:
    """Raises: PermissionError if another user may have put a file of theirs, a name of a foreign one, or a pipe, in
    place of a log. Who owns the folder may: that user can put anything in place of what is in it.
    """
    status, folder = os.fstat(fd), os.fstat(place.folder)
    _check_owner(status, place)
    if not (stat.S_ISREG(status.st_mode) and is_shared(folder, place.folder)):
        return
    if not (is_trusted(status, fd) or have_one_owner(status, folder)):
        reason = f"{name} is a file of another user (uid {status.st_uid}) in a folder that other users can write"
        raise PermissionError(errno.EPERM, reason, name)
    if not _has_one_name(status, place):
        raise PermissionError(errno.EPERM, f"{name} is a hard link in a folder that other users can write", name)


def _has_one_name(status: os.stat_result, place: Place) -> bool:
    """Whether the opened file has this name alone: one that was removed after the opening does not count any more."""
    try:
        named = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, status) and named.st_nlink == 1


def _check_owner(status: os.stat_result, place: Place) -> None:
    if stat.S_ISFIFO(status.st_mode) and not is_trusted_in(status, place.folder):
        reason = f"{place.name} is a named pipe of another user (uid {status.st_uid})"
        raise PermissionError(errno.EPERM, reason, place.name)
    if not stat.S_ISREG(status.st_mode) and may_be_strangers_name(status, place.folder):
        reason = f"{place.name} is a pipe or device with several names, where others may write"
        raise PermissionError(errno.EPERM, reason, place.name)


def append(name: str, data: bytes, *, folder: int | None = None) -> None:
    """Effect: adds the data, in one write, to the end of a regular file that exists. Raises: OSError."""
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | SAFELY, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size < MAX_LINES_FILE and os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    finally:
        os.close(fd)


def open_pipe(path: str, flags: int, *, folder: int | None = None) -> int:
    """A descriptor of an end of a named pipe, O_RDONLY or O_WRONLY, opened without waiting. Raises: OSError."""
    fd = os.open(path, flags | SAFELY, dir_fd=folder)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a named pipe", path)


def open_output_pipe(path: str, *, folder: int | None = None) -> int:
    """A descriptor for a program's output to a named pipe, whose writes wait for the reader. Raises: OSError."""
    fd = open_pipe(path, os.O_WRONLY, folder=folder)
    os.set_blocking(fd, True)
    return fd


def make_pipe(path: str) -> tuple[int, int]:
    """The read and the write end of a new named pipe, both non-blocking. With its own writer, it never ends.

    Raises: OSError.
    """
    os.mkfifo(path, 0o600)
    return open_pipe(path, os.O_RDONLY), open_pipe(path, os.O_WRONLY)


def replace_by_empty(path: str, file: tuple[int, int]) -> None:
    """Effect: replaces a file, given by device and inode, by an empty one with the same permissions and owner.

    The path has no links. Nothing happens if another file is there: another user may have put it there meanwhile.
    Raises: OSError.
    """
    parent, name = os.path.split(path)
    folder = os.open(parent, FOLDER)
    try:
        _replace_if(name, b"", folder=folder, expected=lambda status: (status.st_dev, status.st_ino) == file)
    finally:
        os.close(folder)


def write_at_once(path: str, data: bytes) -> None:
    """Effect: the regular file at a path that another program named holds the data. Raises: OSError.

    A file that exists keeps its permissions; anything else than a regular file stays as it is.
    """
    fd = _open_checked(locate(path), os.O_WRONLY | os.O_CREAT | SAFELY, 0o600, path)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.ftruncate(fd, 0)
        _write_all(fd, data)
    else:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Effect: writes the data and closes the file. Raises: OSError, on network file systems when it is closed."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
