"""The folder into which the processes of a diagnosis write, read with care."""

from __future__ import annotations

import json
import os
import re

from cpulaunch.launch.process.run_directory import in_run_directory
from cpulaunch.measure.diagnosis.figures import growths, read_figures
from cpulaunch.records.errors import LEAVE_FOLDERS, LaunchError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import FAILED, FETCHES, FIGURES, IN_THREADS, LOADED, STEPPING, TRACES
from cpulaunch.system.files.reading import open_regular, read_from, read_start
from cpulaunch.system.process_state import process_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from cpulaunch.measure.diagnosis.figures import ProcessFigures

    Content: TypeAlias = ProcessFigures | dict[str, float] | None
    """What a process or a DataLoader worker wrote; None if it is malformed."""
    Version: TypeAlias = tuple[int, int, int]
    """Inode, bytes and time of the last change (in ns) of a file."""

MAX_FILE_BYTES = 1 << 21
"""Of a file that is read; the largest have some 300 KB."""
MAX_FILES, MAX_BYTES = 1024, 1 << 26
"""Read of one launch, of the files of all its processes together; so many processes of each state count."""
MAX_TRACE_BYTES = 1 << 28
"""Of a profiler's trace, which is in memory while it is copied; a step of a large model writes some 10 MB."""
MAX_FAILURE = 300
"""Characters of the reason why a process could not be measured."""
NAME = re.compile(rf"({FIGURES}|{FETCHES})([0-9]{{1,10}})-([0-9]{{1,10}})[.]json")
"""As `figures_name` makes them; those of files that are being written are longer."""


def names_in(folder: str) -> frozenset[str]:
    """The names of the files there. Raises: LaunchError if the folder is gone, which the program may remove."""
    _, own = in_run_directory(os.path.join(folder, ""))
    try:
        return frozenset(os.listdir(folder if own is None else own))
    except OSError as error:
        raise LaunchError(
            "cannot read what the program's processes wrote about their steps",
            value=folder,
            source=error.strerror,
            hint=LEAVE_FOLDERS,
        ) from None


def read_states(folder: str) -> frozenset[str]:
    """How far any of the processes came: LOADED, IN_THREADS, STEPPING."""
    names = names_in(folder)
    return frozenset(state for state in (LOADED, IN_THREADS, STEPPING) if any(name.startswith(state) for name in names))


def stepping_processes(folder: str) -> frozenset[int]:
    """The ids of the processes that make steps, or made some."""
    return _processes(folder, STEPPING)


def failed_processes(folder: str) -> frozenset[int]:
    """The ids of the processes that could not be measured."""
    return _processes(folder, FAILED)


def read_failure(folder: str) -> str | None:
    """Why a process could not be measured, in its own words; None if none failed."""
    names = sorted(name for name in names_in(folder) if name.startswith(FAILED))
    return _text(f"{folder}/{names[0]}")[:MAX_FAILURE] if names else None


def _text(path: str) -> str:
    name, own = in_run_directory(path)
    try:
        return read_start(name, max_bytes=4 * MAX_FAILURE, folder=own).decode("utf-8", "replace")
    except OSError:
        return ""


def _processes(folder: str, start: str) -> frozenset[int]:
    found = process_ids(name.removeprefix(start) for name in names_in(folder) if name.startswith(start))
    return frozenset(sorted(found)[:MAX_FILES])


class FiguresReader:
    """Reads the figures in a folder. A file is read again only if another inode, size or time shows that it is new."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Version, Content]] = {}
        self.ignored = 0
        """Files that the last reading left out: malformed ones, and those beyond MAX_FILES and MAX_BYTES."""

    def read(self) -> tuple[ProcessFigures, ...]:
        """The figures of all processes, with those of their DataLoader workers. Raises: LaunchError, as names_in."""
        names = _in_turn(names_in(self._folder))
        known, left = self._known, MAX_BYTES
        self._known = {}
        for name in names[:MAX_FILES]:
            if (found := self._read(name, known.get(name), min(left, MAX_FILE_BYTES))) is not None:
                self._known[name] = found
                left -= found[0][1]
        contents = [content for _, content in self._known.values() if content is not None]
        self.ignored = len(names) - len(contents)
        figures = [each for each in contents if not isinstance(each, dict)]
        return _with_fetches(figures, [each for each in contents if isinstance(each, dict)])

    def _read(self, name: str, known: tuple[Version, Content] | None, most: int) -> tuple[Version, Content] | None:
        """The version and the content of a file; None if it cannot be read, or has more bytes than this."""
        path, own = in_run_directory(f"{self._folder}/{name}")
        try:
            if known is not None and known[0] == _version(os.stat(path, dir_fd=own, follow_symlinks=False)):
                return known if known[0][1] <= most else None
            fd = open_regular(path, folder=own)
            try:
                version = _version(os.fstat(fd))
                if version[1] > most:
                    return None
                text = read_from(fd, version[1]).decode("utf-8", "replace")
            finally:
                os.close(fd)
        except OSError:
            return None
        return version, read_figures(text) if name.startswith(FIGURES) else _fetches(text)


def _version(status: os.stat_result) -> Version:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _in_turn(names: Iterable[str]) -> list[str]:
    """The names of files of figures: the first of each worker, then the second of each, and so on.

    So a worker's flood of files takes no part of what is read of another. Of a worker, figures come first.
    """
    found = filter(None, map(NAME.fullmatch, names))
    counts: dict[int, int] = {}
    turns = []
    for _, _, worker, name in sorted((it[1] == FETCHES, int(it[3]), int(it[2]), it[0]) for it in found):
        turns.append((counts.setdefault(worker, 0), worker, name))
        counts[worker] += 1
    return [name for _, _, name in sorted(turns)]


def _with_fetches(figures: list[ProcessFigures], workers: list[dict[str, float]]) -> tuple[ProcessFigures, ...]:
    """The figures, with the sums of all DataLoader workers in those of processes that have some."""
    if not workers:
        return tuple(figures)
    fetches: dict[str, float] = {}
    for sums in workers:
        for key, value in sums.items():
            fetches[key] = fetches.get(key, 0.0) + value
    with_loaders = sum(bool(each.loader_workers) for each in figures)
    fetches["busy"] = fetches.get("busy", 0.0) / max(1, with_loaders)
    return tuple(replace(each, fetches=fetches) if each.loader_workers else each for each in figures)


def _fetches(text: str) -> dict[str, float] | None:
    """The sums in a DataLoader worker's file, with `busy`: the CPUs that it wanted on average, from 0 to 1.

    None if it holds something else.
    """
    try:
        sums = growths(json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    wall, wanted = sums.get("wall", 0.0), sums.get("cpu", 0.0) + sums.get("delay", 0.0)
    return sums | {"busy": min(1.0, wanted / wall) if wall > 0 else 0.0}


def read_trace(folder: str, pid: int) -> bytes | None:
    """The profiler's trace of a process; None if it wrote none. Of one larger than MAX_TRACE_BYTES, a byte more."""
    name, own = in_run_directory(f"{folder}/{TRACES}{pid}.json")
    try:
        return read_start(name, max_bytes=MAX_TRACE_BYTES + 1, folder=own)
    except OSError:
        return None
