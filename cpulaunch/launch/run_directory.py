"""The directory of one run, through which workers tell their launch things; gone when the run is over."""

from __future__ import annotations

import os
import shutil
import tempfile

from cpulaunch.errors import LaunchError
from cpulaunch.launch.start import Start
from cpulaunch.record import fields
from cpulaunch.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ARRIVALS, GATE = "arrivals", "gate"
"""The start barrier's named pipes: the names in worker/barrier.py."""


def make_run_directory(environ: Mapping[str, str], workers: Iterable[int]) -> str:
    """The path of a new directory with an empty file of events for each worker. Raises: LaunchError."""
    parent = environ.get("TMPDIR") or None
    try:
        directory = os.path.abspath(tempfile.mkdtemp(prefix="cpulaunch-", dir=parent))
        for worker in workers:
            os.close(os.open(events_path(directory, worker), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise LaunchError(
            "no directory for this run",
            value=error.filename or parent,
            source=error.strerror,
            hint="set TMPDIR to a directory that can be written",
        ) from None
    return directory


def events_path(directory: str, worker: int) -> str:
    """Where a worker tells what happens in it."""
    return os.path.join(directory, f"worker-{worker}.jsonl")


def telling_starts(starts: Sequence[Start], directory: str) -> tuple[Start, ...]:
    """The starts of workers that tell this run's directory what happens in them."""
    return tuple(_telling(start, events_path(directory, start.worker)) for start in starts)


def _telling(start: Start, path: str) -> Start:
    values = {name: getattr(start, name) for name in fields(Start)}
    return Start(**values | {"environ": {**start.environ, EVENTS_VARIABLE: path}})


def remove_run_directory(directory: str) -> None:
    """Effect: nothing of the run's directory is left."""
    shutil.rmtree(directory, ignore_errors=True)
