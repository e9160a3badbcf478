"""Reading the files of a machine, this one ("/") or a captured one (--sysroot); all of `probe` reads through here."""

import errno
import os
import stat
from itertools import islice

from cpulaunch.records.cpulist import parse_cpulist, parse_cpumask
from cpulaunch.records.errors import ProbeError

MAX_LINKS = 40
MAX_PATH = 4096
"""Letters of a path, and of folders and links on the way to a file. Source: Linux, include/uapi/linux/limits.h."""
MAX_NAMES = 1 << 16
"""Names read of one folder of a captured machine."""
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Without blocking, because a captured tree may contain a pipe."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
INSPECT = getattr(os, "O_PATH", READ) | getattr(os, "O_CLOEXEC", 0)
KERNEL = ("/sys/", "/proc/")
PADDING = b"\0 \t\r\n"
MAX_DIGITS = 20
"""Digits of the largest number that the kernel writes: an unsigned one of 64 bits."""


class Root:
    """A directory that holds a machine's files. Names are relative to it ("sys/…", "proc/…").

    Symbolic links of a captured machine are followed inside it: absolute ones start at the root and
    `..` stops there, so nothing outside is ever read. Of a captured machine, only regular files are opened.
    """

    def __init__(self, path: str = "/") -> None:
        self.path = os.path.abspath(path)
        self.live = self.path == os.sep
        self._prefix = "" if self.live else self.path
        self._directories: dict[str, str] = {}

    def bytes(self, name: str, *, limit: int = 1 << 24) -> bytes | None:
        """The file's first `limit` bytes; None if it is absent or cannot be read."""
        try:
            descriptor = self.open(name)
        except (OSError, ValueError):
            return None
        try:
            return _read(descriptor, limit)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def text(self, name: str, *, limit: int = 1 << 24) -> str | None:
        """The text of its first `limit` bytes without surrounding white space and NULs; None if absent or empty."""
        data = self.bytes(name, limit=limit)
        return data.strip(PADDING).decode(errors="replace") or None if data else None

    def integer(self, name: str) -> int | None:
        """The file's decimal number; None if absent. Raises: ProbeError if it is not one."""
        text = self.text(name)
        if text is None:
            return None
        size = natural(text.removeprefix("-"))
        if size is None:
            raise self.malformed("number", text, name)
        return -size if text.startswith("-") else size

    def cpulist(self, name: str) -> frozenset[int] | None:
        """The ids of a list file; None if absent or empty. Raises: ProbeError if malformed."""
        text = self.text(name)
        try:
            return None if text is None else parse_cpulist(text)
        except ValueError:
            raise self.malformed("list of ids", text, name) from None

    def cpumask(self, name: str) -> frozenset[int] | None:
        """The ids of a hexadecimal mask file; None if absent or empty. Raises: ProbeError if malformed."""
        text = self.text(name)
        try:
            return None if text is None else parse_cpumask(text)
        except ValueError:
            raise self.malformed("mask of ids", text, name) from None

    def ids(self, stem: str, suffix: str = "_list") -> frozenset[int] | None:
        """A group of ids, from its list file (stem + suffix) or its mask file (stem); None if neither exists."""
        listed = self.cpulist(stem + suffix)
        return self.cpumask(stem) if listed is None else listed

    def names(self, name: str) -> list[str]:
        """The names in a directory, in no order; empty if the directory is absent."""
        try:
            if self.live:
                return os.listdir(self.host_path(name))
            with os.scandir(self.host_path(name)) as entries:
                return [entry.name for entry in islice(entries, MAX_NAMES)]
        except (OSError, ValueError):
            return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file or directory."""
        try:
            return os.path.lexists(self.host_path(name))
        except (OSError, ValueError):
            return False

    def host_path(self, name: str) -> str:
        """The path on this machine of a file under the root, links followed inside it. Raises: OSError."""
        if self.live:
            return "/" + name.lstrip("/")
        return self._prefix + self.resolve_links(name)[-1]

    def resolve_links(self, name: str) -> list[str]:
        """All directories and links on the path to the file, then the file, as absolute names inside the root.

        Raises: OSError if links form a circle, or there are too many.
        """
        _check_length(len(name), name)
        visited, here, links = ["/"], "", 0
        todo = name.split("/")[::-1]
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                here = here.rpartition("/")[0]
                continue
            here = f"{here}/{part}"
            visited.append(here)
            _check_length(max(len(here), len(visited)), name)
            target = self._link(here)
            if target is not None:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
                todo.extend(target.split("/")[::-1])
                here = "" if target.startswith("/") else here.rpartition("/")[0]
        visited.append(here or "/")
        return visited

    def malformed(self, what: str, value: object, name: str) -> ProbeError:
        """The error for a file that exists and does not parse."""
        path = f"{self._prefix}/{name.lstrip('/')}"
        return ProbeError(f"not a {what}", value=repr(value)[:80], source=path, hint=f"cat {path}")

    def _link(self, inside: str) -> str | None:
        try:
            return os.readlink(self._prefix + inside)
        except OSError:
            return None

    def open(self, name: str) -> int:
        """A descriptor for reading the file, if it is a regular one. Raises: OSError.

        Of this machine, those of the kernel, which are many, are not looked at before.
        """
        if self.live:
            path = "/" + name.lstrip("/")
            if path.startswith(KERNEL):
                return os.open(path, READ)
            try:
                return _open_regular(path, live=True)
            except OSError as error:
                if error.errno != errno.ESTALE:  # On NFS: another host has replaced what was looked up.
                    raise
            return _open_regular(path, live=True)
        directory, _, base = name.rpartition("/")
        if base not in ("", ".", ".."):
            try:
                return _open_regular(f"{self._directory(directory)}/{base}")
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EMLINK):
                    raise
        return _open_regular(self.host_path(name))

    def _directory(self, name: str) -> str:
        """The path on this machine of a directory under the root; each of its parents is looked up once."""
        _check_length(len(name), name)
        missing = []
        while name and name not in self._directories:
            missing.append(name)
            name = name.rpartition("/")[0]
        real = self._directories[name] if name else self._prefix
        for each in reversed(missing):
            part = each.rpartition("/")[2]
            if part:
                real = f"{real}/{part}"
            if part == "..":
                inside = real.removeprefix(self._prefix).rpartition("/")[0].rpartition("/")[0]
                real = self._prefix + inside
            elif os.path.islink(real):
                real = self.host_path(each)
            self._directories[each] = real
        return real


def _check_length(length: int, name: str) -> None:
    if length > MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)


def _open_regular(path: str, *, live: bool = False) -> int:
    """A descriptor for reading a regular file. Raises: OSError; ELOOP for a link, unless it is one of this machine.

    Nothing else is ever opened, except by O_PATH: the open of a device may have effects, and another user's link may
    lead to a file of the kernel's whose reading has some. Source: open(2).
    """
    nofollow = 0 if live else NOFOLLOW
    found = os.open(path, INSPECT | nofollow)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or (live and _is_kernels(found, status)):
            reason = errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.EINVAL
            raise OSError(reason, os.strerror(reason), path)
        link = f"/proc/self/fd/{found}"
        return os.open(link, READ) if os.path.exists(link) else os.open(path, READ | nofollow)
    finally:
        os.close(found)


def _is_kernels(fd: int, status: os.stat_result) -> bool:
    """Whether an opened file is one of the kernel's own, which has no blocks in a file system without a device."""
    if getattr(status, "st_blocks", 1) or os.major(status.st_dev):
        return False
    from cpulaunch.system.files.reading import is_kernels  # Most files are on a device.

    return is_kernels(fd)


def natural(text: str) -> int | None:
    """The number that the text writes in decimal digits; None for any other text, and above 20 digits."""
    return int(text) if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit() else None


def _read(descriptor: int, limit: int) -> bytes:
    chunks = []
    while limit > 0:
        chunk = os.read(descriptor, min(limit, 1 << 16))
        if not chunk:
            break
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)
