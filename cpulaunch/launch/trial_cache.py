"""A cache of verdicts: a small text file, trusted only if its owner alone can write it."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = "cpulaunch trials 1"
GOOD = "good"
MAX_BYTES = 1 << 18
MAX_ENTRIES = 200


def read_verdicts(path: str) -> dict[str, str | None]:
    """By key: the verdict, None for a success. Empty if the file is absent, malformed or writable by other users."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return {}
    try:
        return _parse(os.read(fd, MAX_BYTES + 1)) if _is_private(os.fstat(fd)) else {}
    except OSError:
        return {}
    finally:
        os.close(fd)


def _is_private(status: os.stat_result) -> bool:
    private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and private


def _parse(data: bytes) -> dict[str, str | None]:
    """The verdicts in lines "KEY<tab>VERDICT" under the header; none without that header."""
    header, *lines = data.decode("utf-8", "replace").split("\n")
    if header != HEADER or len(data) > MAX_BYTES:
        return {}
    verdicts: dict[str, str | None] = {}
    for line in lines:
        key, tab, verdict = line.partition("\t")
        if not tab:
            continue
        verdicts[key] = None if verdict == GOOD else verdict
    return verdicts


def write_verdicts(path: str, verdicts: Mapping[str, str | None]) -> None:
    """Effect: replaces the file by one with the latest verdicts, atomically; does nothing if that fails."""
    entries = list(verdicts.items())[-MAX_ENTRIES:]
    lines = [HEADER, *(f"{key}\t{GOOD if verdict is None else _one_line(verdict)}" for key, verdict in entries), ""]
    temporary = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        data = "\n".join(lines).encode("utf-8", "backslashreplace")
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
    finally:
        os.close(fd)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500] or "failed"
