"""The folder into which the processes of a diagnosis write, read with care."""

from __future__ import annotations

import json
import os

from cpulaunch.measure.diagnosis.figures import growths, read_figures
from cpulaunch.records.errors import LEAVE_FOLDERS, LaunchError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import FAILED, FETCHES, FIGURES, IN_THREADS, LOADED, STEPPING, TRACES
from cpulaunch.system.files.reading import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.measure.diagnosis.figures import ProcessFigures

MAX_BYTES = 1 << 22
MAX_PROCESSES = 256
MAX_FAILURE = 300


def names_in(folder: str) -> frozenset[str]:
    """The names of the files there. Raises: LaunchError if the folder is gone, which the program may remove."""
    try:
        return frozenset(os.listdir(folder))
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


def _processes(folder: str, start: str) -> frozenset[int]:
    found = (name.removeprefix(start) for name in names_in(folder) if name.startswith(start))
    return frozenset(int(text) for text in found if text.isascii() and text.isdigit())


def read_folder(folder: str) -> tuple[ProcessFigures, ...]:
    """The figures of all processes, with those of their DataLoader workers."""
    names = sorted(names_in(folder))
    found = []
    for name in [name for name in names if name.startswith(FIGURES)][:MAX_PROCESSES]:
        figures = read_figures(_text(f"{folder}/{name}"))
        if figures is not None:
            found.append(figures)
    fetches: dict[str, float] = {}
    for name in [name for name in names if name.startswith(FETCHES)][:MAX_PROCESSES]:
        for key, value in _with_busy(_numbers(_text(f"{folder}/{name}"))).items():
            fetches[key] = fetches.get(key, 0.0) + value
    if not fetches:
        return tuple(found)
    with_loaders = sum(bool(each.loader_workers) for each in found)
    fetches["busy"] = fetches.get("busy", 0.0) / max(1, with_loaders)
    return tuple(replace(each, fetches=fetches) if each.loader_workers else each for each in found)


def _with_busy(sums: dict[str, float]) -> dict[str, float]:
    """The sums of a DataLoader worker, with `busy`: the CPUs that it wanted on average while it ran, from 0 to 1."""
    wall, wanted = sums.get("wall", 0.0), sums.get("cpu", 0.0) + sums.get("delay", 0.0)
    return sums | {"busy": min(1.0, wanted / wall) if wall > 0 else 0.0}


def read_trace(folder: str, pid: int) -> bytes | None:
    """The profiler's trace of a process; None if it wrote none."""
    try:
        return read_start(f"{folder}/{TRACES}{pid}.json", max_bytes=1 << 30)
    except OSError:
        return None


def _text(path: str) -> str:
    try:
        return read_start(path, max_bytes=MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _numbers(text: str) -> dict[str, float]:
    try:
        return growths(json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
