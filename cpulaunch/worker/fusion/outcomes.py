"""What is known about graphs on this machine, in a text file that is trusted only if its owner alone can write it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress

from cpulaunch.worker.fusion.search import TrialOutcome

HEADER = "cpulaunch graphs 1"
MAX_BYTES = 1 << 20
MAX_ENTRIES = 2000
MAX_REASON = 300

LINE = re.compile(r"([0-9a-f]{64})\t(works|refused)\t([^\t]*)")
POSITIONS = re.compile(r"(?:\d{1,6}(?:,\d{1,6})*)?")


class UnusableError(Exception):
    """The folder cannot be used; the message says why."""


def default_folder() -> str:
    """The folder of this user's outcomes. Source: XDG Base Directory Specification."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):
        caches = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "cpulaunch", "graphs")


def open_folder(folder: str) -> None:
    """Effect: creates the folder. Raises: UnusableError if other users could change what is in it."""
    if not os.path.isabs(folder):
        raise UnusableError(f"this user has no home folder ({folder})")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except (OSError, ValueError) as error:
        raise UnusableError(str(error)) from None
    if not stat.S_ISDIR(status.st_mode):
        raise UnusableError(f"{folder} is not a folder")
    if status.st_uid != os.geteuid():
        raise UnusableError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableError(f"other users can write to {folder}")
    if not os.access(folder, os.W_OK):
        raise UnusableError(f"{folder} cannot be written to")


def read_outcomes(folder: str) -> dict[str, TrialOutcome]:
    """The outcomes by key; none if the file is absent, malformed, or could have been changed by other users."""
    try:
        fd = os.open(_path(folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return {}
    try:
        return _parse(os.read(fd, MAX_BYTES + 1)) if _is_private(os.fstat(fd)) else {}
    except OSError:
        return {}
    finally:
        os.close(fd)


def _path(folder: str) -> str:
    return os.path.join(folder, "outcomes")


def _is_private(status: os.stat_result) -> bool:
    private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and private


def _parse(data: bytes) -> dict[str, TrialOutcome]:
    header, *lines = data.decode("utf-8", "replace").split("\n")
    if header != HEADER or len(data) > MAX_BYTES:
        return {}
    outcomes: dict[str, TrialOutcome] = {}
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            continue
        key, verdict, detail = match.groups()
        if verdict == "refused":
            outcomes[key] = TrialOutcome(refusal=detail or "refused")
        elif POSITIONS.fullmatch(detail):
            outcomes[key] = TrialOutcome(left_out=frozenset(int(part) for part in detail.split(",") if part))
    return outcomes


def write_outcomes(folder: str, outcomes: Mapping[str, TrialOutcome]) -> None:
    """Effect: replaces the file by one with the latest outcomes, atomically; does nothing if that fails."""
    lines = [HEADER, *(_line(key, outcome) for key, outcome in list(outcomes.items())[-MAX_ENTRIES:]), ""]
    temporary = f"{_path(folder)}.{os.getpid()}"
    with suppress(OSError):
        os.unlink(temporary)  # Left by an earlier process of this number.
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        data = "\n".join(lines).encode("utf-8", "backslashreplace")
        if os.write(fd, data) == len(data):
            os.replace(temporary, _path(folder))
    except OSError:
        pass
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(temporary)


def _line(key: str, outcome: TrialOutcome) -> str:
    if outcome.refusal is not None:
        return f"{key}\trefused\t{' '.join(outcome.refusal.split())[:MAX_REASON]}"
    return f"{key}\tworks\t{','.join(map(str, sorted(outcome.left_out)))}"
