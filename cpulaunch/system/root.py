"""Reading the files of a machine, this one ("/") or a captured one (--sysroot); all of `probe` reads through here."""

import errno
import os

from cpulaunch.records.cpulist import parse_cpulist, parse_cpumask
from cpulaunch.records.errors import ProbeError

MAX_LINKS = 40
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Without blocking, because a captured tree may contain a pipe."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
PADDING = b"\0 \t\r\n"
MAX_DIGITS = 20
"""Digits of the largest number that the kernel writes: an unsigned one of 64 bits."""


class Root:
    """A directory that holds a machine's files. Names are relative to it ("sys/…", "proc/…").

    Symbolic links of a captured machine are followed inside it: absolute ones start at the root and
    `..` stops there, so nothing outside is ever read.
    """

    def __init__(self, path: str = "/") -> None:
        self.path = os.path.abspath(path)
        self.live = self.path == os.sep
        self._prefix = "" if self.live else self.path
        self._directories: dict[str, str] = {}

    def bytes(self, name: str, *, limit: int = 1 << 24) -> bytes | None:
        """The file's first `limit` bytes; None if it is absent or cannot be read."""
        try:
            descriptor = self._open(name)
        except (OSError, ValueError):
            return None
        try:
            return _read(descriptor, limit)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def text(self, name: str) -> str | None:
        """The file's text without surrounding white space and NULs; None if it is absent or empty."""
        data = self.bytes(name)
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
            return os.listdir(self.host_path(name))
        except (OSError, ValueError):
            return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file or directory."""
        try:
            return os.path.lexists(self.host_path(name))
        except (OSError, ValueError):
            return False

    def host_path(self, name: str) -> str:
        """The path on this machine of a file under the root, links followed inside it. Raises: OSError on a loop."""
        if self.live:
            return "/" + name.lstrip("/")
        return self._prefix + self.resolve_links(name)[-1]

    def resolve_links(self, name: str) -> list[str]:
        """All directories and links on the path to the file, then the file, as absolute names inside the root.

        Raises: OSError if links form a circle.
        """
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

    def _open(self, name: str) -> int:
        if self.live:
            return os.open("/" + name.lstrip("/"), READ)
        directory, _, base = name.rpartition("/")
        if base not in ("", ".", ".."):
            try:
                return os.open(f"{self._directory(directory)}/{base}", READ | NOFOLLOW)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EMLINK):
                    raise
        return os.open(self.host_path(name), READ | NOFOLLOW)

    def _directory(self, name: str) -> str:
        """The path on this machine of a directory under the root; each of its parents is looked up once."""
        real = self._directories.get(name)
        if real is None:
            parent, _, part = name.rpartition("/")
            real = f"{self._directory(parent)}/{part}" if part else self._prefix
            if part == ".." or os.path.islink(real):
                real = self.host_path(name)
            self._directories[name] = real
        return real


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
