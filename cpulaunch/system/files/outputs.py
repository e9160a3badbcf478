"""Files that a command ends with, where the user says: checked before the work, written after it."""

from __future__ import annotations

import errno
import os
import stat

from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import record
from cpulaunch.system.files.writing import check_output, write_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.system.files.special import FileId


@record
class Output:
    """A file that a command ends with: what messages call it, and what its option needs."""

    name: str
    hint: str


REPORT = Output(name="report", hint="--report needs a FILE.json in a writable directory, or - for stdout")
PAGE = Output(name="page", hint="--html needs a FILE.html in a writable directory")
TRACE = Output(name="trace", hint="--trace needs a FILE in a writable directory")
PICTURES = {
    "svg": Output(name="picture", hint="--svg needs a FILE.svg in a writable directory"),
    "png": Output(name="picture", hint="--png needs a FILE.png in a writable directory"),
}


def check_path(output: Output, path: str) -> FileId | None:
    """The pipe or device at `path`; None: there is none. Raises: CpulaunchError if no file can be written there."""
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise _unwritable(output, path, "it is a directory")
    if not os.path.isdir(folder):
        raise _unwritable(output, path, f"there is no directory {folder}")
    if not os.access(folder if _is_replaced(path) else path, os.W_OK):
        raise _unwritable(output, path, f"no permission to write in {folder}")
    try:
        return check_output(path)
    except OSError as error:
        raise _unwritable(output, path, error.strerror or str(error)) from None


def save_output(
    output: Output, path: str, content: str | bytes, *, direct: FileId | bool | None = True
) -> CpulaunchError | None:
    """The error, if the content cannot be written.

    Effect: a regular file is replaced atomically; anything else (a pipe, /dev/stdout) is written directly, if it is
    what `check_path` found (`direct`): a program may have put it there since. Only this user can read a new file. If
    another user has taken its name since, in a sticky folder, the content is in a file beside it, as the error says.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    try:
        write_output(path, data, direct=direct)
    except OSError as error:
        reason = error.strerror or str(error)
        beside = _save_beside(path, data) if direct is None and not _is_useless(path, error) else None
        return _unwritable(output, path, reason if beside is None else f"{reason}; it is in {beside}")
    return None


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def _is_useless(path: str, error: OSError) -> bool:
    """Whether a file beside this one would fail as this one did: its file system is full, and no link leads to it."""
    folder = os.path.dirname(os.path.abspath(path))
    return error.errno in FULL and os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def _save_beside(path: str, data: bytes) -> str | None:
    """The path of a new file with the data, in the same folder; None if none can be made."""
    beside = f"{path}.{os.urandom(8).hex()}"
    try:
        write_output(beside, data)
    except OSError:
        return None
    return beside


def _is_replaced(path: str) -> bool:
    """Whether a report at this path is a regular file, existing or new."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _unwritable(output: Output, path: str, reason: str) -> CpulaunchError:
    return CpulaunchError(f"the {output.name} cannot be written", value=path, source=reason, hint=output.hint)
