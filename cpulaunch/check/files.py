"""Programs and notebooks in files and folders: found and read; what cannot be read is said."""

import codecs
import os
import re
import stat
import tokenize
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path

from cpulaunch.check.findings import ProgramFile, Unreadable
from cpulaunch.records.record import record
from cpulaunch.system.files.owners import have_one_owner, is_trusted
from cpulaunch.system.files.paths import FOLDER, may_be_strangers_name
from cpulaunch.system.files.reading import open_regular, read_from
from cpulaunch.system.files.writing import replace_unchanged

SUFFIXES = (".py", ".ipynb")
NAMES_ALONE = ("idna", "punycode")
"""Encodings of names, which Python decodes in a time that grows with the square of a text's length."""
MAX_BYTES = 4 << 20
"""Of a larger file, no person has written the source."""
SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}
TEST_FILE = re.compile(r"(^|/)tests?/(.*/)?test_[^/]*$")
"""Such a name in a folder of tests is a test's, whose speed is of no concern."""


@record
class ProgramText:
    """A file's text, its encoding, and the status of the file when it was read."""

    text: str
    encoding: str
    status: os.stat_result


def programs(paths: Iterable[str], exclude: Iterable[str] = ()) -> Iterator[ProgramFile | Unreadable]:
    """Every file named, and every program in the folders named; links to folders are not followed.

    Whether it is a test is said by the folders below the one named; for a file, by those below the working directory.
    """
    patterns = tuple(exclude)
    for path in paths:
        if os.path.isdir(path):
            yield from _below(path, patterns)
        elif os.path.lexists(path):
            yield ProgramFile(path=path, is_test=_is_test(path, os.curdir))
        else:
            yield Unreadable(path=path, reason="no such file or folder")


def _is_test(path: str, folder: str) -> bool:
    """Whether a file is a test by the part of its path below a folder: what is above says where a checkout lies."""
    below = os.path.relpath(path, folder)
    return below.split(os.sep)[0] != os.pardir and TEST_FILE.search(below) is not None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or leads to one; one whose path is too long for the system is."""
    try:
        return entry.is_dir()
    except OSError:  # A link that leads nowhere.
        return False


def _below(folder: str, exclude: tuple[str, ...]) -> Iterator[ProgramFile | Unreadable]:
    failed: list[OSError] = []
    places = [folder]  # os.walk of Python 3.11 recurses, 1,000 folders deep at most.
    while places:
        place = places.pop()
        try:
            with os.scandir(place) as found:
                entries = sorted((each.name, _is_folder(each), each.is_symlink()) for each in found)
        except OSError as error:
            failed.append(error)
            continue
        folders = []
        for name, is_folder, is_link in entries:
            path = os.path.join(place, name)
            if is_folder:
                if name not in SKIPPED and not name.startswith(".") and not is_link:
                    folders.append(path)
            elif name.endswith(SUFFIXES) and not _is_excluded(Path(path), Path(folder), exclude):
                yield ProgramFile(path=path, is_test=_is_test(path, folder))
        places += reversed(folders)
    yield from (Unreadable(path=str(each.filename), reason=each.strerror or "cannot be read") for each in failed)


def _is_excluded(path: Path, folder: Path, exclude: tuple[str, ...]) -> bool:
    """Whether a pattern is one of a file, or of a folder above it that is below the one to be checked."""
    if not exclude:
        return False
    below = [each for each in (path, *path.parents) if each != folder and each.is_relative_to(folder)]
    return any(each.match(pattern.removeprefix("**/")) for pattern in exclude for each in below)


def read_program(path: str) -> ProgramText | Unreadable:
    """A file's text in the encoding that its first lines name; a link is read at its target."""
    try:
        data, status, _ = _read(os.path.realpath(path))
        if len(data) > MAX_BYTES:
            return Unreadable(path=path, reason=f"larger than {MAX_BYTES >> 20} MiB")
        encoding = "utf-8-sig" if path.endswith(".ipynb") else tokenize.detect_encoding(BytesIO(data).readline)[0]
        name = codecs.lookup(encoding).name  # The declared one may be as long as the file.
        if name in NAMES_ALONE:
            return Unreadable(path=path, reason=f"in {name}, an encoding of names")
        text = data.decode(encoding)
    except OSError as error:
        return Unreadable(path=path, reason=error.strerror or "cannot be read")
    except (UnicodeError, SyntaxError, LookupError):
        return Unreadable(path=path, reason="not in the encoding that it declares, by default UTF-8")
    if "\0" in text:
        return Unreadable(path=path, reason="contains NUL: not a text")
    return ProgramText(text=text, encoding=encoding, status=status)


def _read(path: str) -> tuple[bytes, os.stat_result, bool]:
    """At most one byte more of a file than is allowed, the file's status before, and whether it is this user's or
    root's. Raises: OSError.
    """
    fd = open_regular(path)
    try:
        status = os.fstat(fd)
        return read_from(fd, MAX_BYTES + 1), status, is_trusted(status, fd)
    finally:
        os.close(fd)


def write_program(path: str, text: str, read: ProgramText) -> str | None:
    """Why the text could not be written, None if it was.

    Effect: replaces the file that was read, at the target of a link unless another user made that, and keeps its owner,
    mode and encoding. Any other file in its place stays as it is.
    """
    try:
        replace_unchanged(path, text.encode(read.encoding), read=read.status)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:
        return str(error)
    return None


def read_configuration(start: str, notify: Callable[[str], object]) -> tuple[str, bytes] | None:
    """Path and bytes of the nearest pyproject.toml in a folder or above it; None if there is none to be read.

    One that belongs to neither this user, root nor the owner of the folder is passed over, with a warning: anyone can
    put one into /tmp, or a hard link of another file there. Users without a number in this user namespace all show the
    same one.
    """
    place = folder = os.path.realpath(start)
    start_status = os.stat(folder)
    while True:
        path = os.path.join(place, "pyproject.toml")
        try:
            data, status, trusted = _read(path)
            if _may_be_strangers(status, place):
                notify(f"warning: {path} is passed over: another user may have put it there, or written it")
            elif trusted or have_one_owner(status, start_status):
                if len(data) > MAX_BYTES:
                    notify(f"warning: {path} is larger than {MAX_BYTES >> 20} MiB: a table at its end is not read")
                return path, data
            else:
                notify(f"warning: {path} is passed over: it belongs to another user (uid {status.st_uid})")
        except OSError:
            pass
        parent = os.path.dirname(place)
        if parent == place:
            return None
        place = parent


def _may_be_strangers(status: os.stat_result, place: str) -> bool:
    """Whether another user may have linked a file into a folder that others may write, be it of a trusted owner.

    Its other names may be gone. Where a mount shows all as writable, its folders are not sticky. Raises: OSError.
    """
    shared = stat.S_ISVTX | stat.S_IWOTH
    folder = os.open(place, FOLDER)
    try:
        is_written = os.fstat(folder).st_mode & shared == shared and bool(status.st_mode & stat.S_IWOTH)
        return is_written or may_be_strangers_name(status, folder)
    finally:
        os.close(folder)
