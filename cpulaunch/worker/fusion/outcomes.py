"""What is known about graphs on this machine, in a text file that is trusted only if its owner alone can write it.

Only helper processes write it. Each graph has a claim, a byte of another file that is locked while a helper tries the
graph, so that instances that start together learn from each other. A third file, which workers write, says when and how
often a graph was the first unknown one that a process asked for.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from cpulaunch.system.files.caches import (
    open_cache_folder,
    open_lock_file,
    others_access,
    read_lines,
    replace_lines,
    user_cache,
)
from cpulaunch.worker.fusion.search import TrialOutcome

HEADER = "cpulaunch graphs 3"
REQUESTS_HEADER = "cpulaunch graphs asked for 2"
OUTCOMES, CLAIMS, REQUESTS = "outcomes", "claims", "requests"
MAX_BYTES = 1 << 20
MAX_ENTRIES = 2000
MAX_REASON = 300
MAX_SECONDS = 999_999.0

LOCK_SECONDS = 5.0
"""How long a writer waits for another one before it writes all the same."""

IDLE_FACTOR = 5
"""A limit in seconds is for an idle machine. A helper waits for idle CPUs, so it gets so many times as long."""

PAUSE_SECONDS = 0.2

LINE = re.compile(r"([0-9a-f]{64})\t(works|refused)\t([^\t]*)\t(\d{1,6}\.\d)\t(\d{1,6}\.\d)")
REQUEST = re.compile(r"([0-9a-f]{64})\t(\d{1,12})\t(\d{1,3})")
MAX_REQUESTS = 999
CLOCKS_DIFFER = 60
"""Seconds by which hosts that share a home may disagree; what is later was written by a clock since set back."""

POSITIONS = re.compile(r"(?:\d{1,6}(?:,\d{1,6})*)?")


class UnusableError(Exception):
    """The folder cannot be used; the message says why."""


def default_folder() -> str:
    """The folder of this user's outcomes."""
    return user_cache("graphs", os.environ)


@contextmanager
def open_folder(folder: str) -> Iterator[int]:
    """A descriptor of the folder, until the context ends.

    Effect: creates the folder. Raises: UnusableError if other users could change what is in it.
    """
    if not os.path.isabs(folder):
        raise UnusableError(f"this user has no home folder ({folder})")
    try:
        descriptor = open_cache_folder(folder)
    except (OSError, ValueError) as error:
        other = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
        raise UnusableError(f"{folder} is not a folder" if other else str(error)) from None
    try:
        _check(folder, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _check(folder: str, descriptor: int) -> None:
    reason = others_access(descriptor)
    if reason is not None:
        raise UnusableError(f"{folder} cannot be used: {reason}")
    if not os.access(".", os.W_OK, dir_fd=descriptor):
        raise UnusableError(f"{folder} cannot be written to")


def version(folder: str) -> tuple[int, int] | None:
    """What changes whenever the outcomes in the folder do; None if there are none."""
    with suppress(OSError, ValueError):
        status = os.lstat(os.path.join(folder, OUTCOMES))
        return status.st_ino, status.st_mtime_ns
    return None


def read_outcomes(folder: str) -> dict[str, TrialOutcome]:
    """The outcomes by key; none if the file is malformed or not private. Raises: UnusableError."""
    with open_folder(folder) as descriptor:
        return _read(descriptor)


def _read(descriptor: int) -> dict[str, TrialOutcome]:
    outcomes: dict[str, TrialOutcome] = {}
    for line in read_lines(OUTCOMES, header=HEADER, max_bytes=MAX_BYTES, folder=descriptor):
        match = LINE.fullmatch(line)
        if match is None:
            continue
        key, verdict, detail, *numbers = match.groups()
        seconds, cut_after = map(float, numbers)
        if verdict == "refused":
            outcomes[key] = TrialOutcome(refusal=detail or "refused", cut_after=cut_after)
        elif POSITIONS.fullmatch(detail):
            left_out = frozenset(int(part) for part in detail.split(",") if part)
            outcomes[key] = TrialOutcome(left_out=left_out, seconds=seconds, cut_after=cut_after)
    return outcomes


def note_request(folder: str, key: str, *, started: int) -> int:
    """How many processes were noted for this graph before this one. `started`: when this one was, since the epoch.

    One that was started before the last one that was noted asked, as instances are, counts as that one.
    Effect: notes any other. Of two that ask at the same time, one may be forgotten. Raises: UnusableError.
    """
    with open_folder(folder) as descriptor:
        lines = read_lines(REQUESTS, header=REQUESTS_HEADER, max_bytes=MAX_BYTES, folder=descriptor)
        matches = [match for match in map(REQUEST.fullmatch, lines) if match is not None]
        known = {match[1]: (int(match[2]), int(match[3])) for match in matches}
        (last, count), now = known.pop(key, (0, 0)), int(time.time())
        if count and started <= last <= now + CLOCKS_DIFFER:
            return count - 1
        known[key] = (now, min(count + 1, MAX_REQUESTS))
        latest = [f"{each}\t{when}\t{often}" for each, (when, often) in known.items()][-MAX_ENTRIES:]
        replace_lines(REQUESTS, latest, header=REQUESTS_HEADER, folder=descriptor)
        return count


def add_outcomes(folder: str, outcomes: Mapping[str, TrialOutcome]) -> None:
    """Effect: adds the outcomes to the file, as the latest ones; does nothing if that fails. Raises: UnusableError."""
    import fcntl  # Here and below, because the worker imports this module on systems without it too.

    end = time.monotonic() + LOCK_SECONDS
    with open_folder(folder) as descriptor:
        _wait_for(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), lambda: time.monotonic() > end)
        known = {key: outcome for key, outcome in _read(descriptor).items() if key not in outcomes}
        replace_lines(OUTCOMES, _latest_lines(known | dict(outcomes)), header=HEADER, folder=descriptor)


def _latest_lines(outcomes: Mapping[str, TrialOutcome]) -> list[str]:
    """The lines of the latest outcomes, as many as a reader accepts."""
    left, lines = MAX_BYTES - len(HEADER) - 1, []
    for key, outcome in list(outcomes.items())[: -MAX_ENTRIES - 1 : -1]:
        line = _line(key, outcome)
        left -= len(line.encode("utf-8", "backslashreplace")) + 1
        if left < 0:
            break
        lines.append(line)
    return lines[::-1]


def _line(key: str, outcome: TrialOutcome) -> str:
    numbers = f"{min(outcome.seconds, MAX_SECONDS):.1f}\t{min(outcome.cut_after, MAX_SECONDS):.1f}"
    if outcome.refusal is not None:
        return f"{key}\trefused\t{' '.join(outcome.refusal.split())[:MAX_REASON]}\t{numbers}"
    return f"{key}\tworks\t{','.join(map(str, sorted(outcome.left_out)))}\t{numbers}"


def known_or_found(folder: str, key: str, find: Callable[[], TrialOutcome], *, seconds: float) -> TrialOutcome:
    """The outcome for a key: from the folder if it is known by the time the key can be claimed, else what `find` finds.

    `seconds`: limit of a trial. Effect: adds a lasting outcome to the folder.
    """
    end = time.monotonic() + IDLE_FACTOR * seconds
    try:
        with claim(folder, key, is_over=lambda: time.monotonic() > end):
            known = read_outcomes(folder).get(key)
            if known is not None and known.holds_within(seconds):
                return known
            outcome = find()
            if outcome.lasting:
                add_outcomes(folder, {key: outcome})
            return outcome
    except UnusableError as error:
        return TrialOutcome(refusal=str(error), lasting=False)


@contextmanager
def claim(folder: str, key: str, is_over: Callable[[], bool]) -> Iterator[None]:
    """Effect: inside the context this process alone has the claim for the key, unless waiting for it `is_over`.

    The kernel releases it when the process ends; forked processes do not have it. Source: fcntl(2), F_SETLK.
    Raises: UnusableError.
    """
    import fcntl

    with open_folder(folder) as directory:
        try:
            descriptor = open_lock_file(CLAIMS, folder=directory)
        except OSError as error:
            raise UnusableError(str(error)) from None
    place = int(key[:12], 16)
    try:
        _wait_for(lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place), is_over)
        yield
    finally:
        os.close(descriptor)


def _wait_for(lock: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Effect: waits until `lock` does not find another owner. File systems without locks have none."""
    while True:
        try:
            return lock()
        except (BlockingIOError, PermissionError):
            if is_over():
                return None
        except OSError:
            return None
        time.sleep(PAUSE_SECONDS)
