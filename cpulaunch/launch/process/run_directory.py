"""The directory of one run: what workers tell their launch, and error files of ranks; gone when the run is over."""

from __future__ import annotations

import os

from cpulaunch.launch.process.exec_spec import ExecSpec, with_variables
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ARRIVALS, GATE = "arrivals", "gate"
"""The start barrier's named pipes: the names in worker/barrier.py."""

TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp", ".")
"""Where it is without a TMPDIR that can be written, as that of a batch job may be gone.

Source: Python's tempfile, whose import takes as long as planning.
"""


def make_private_directory(environ: Mapping[str, str]) -> str:
    """The absolute path of a new directory that nobody else may read. Raises: LaunchError."""
    failures = []
    for parent in _parents(environ):
        try:
            return new_directory(parent, "cpulaunch-")
        except OSError as error:
            failures.append(error)
    raise _no_directory(failures[0])


def _parents(environ: Mapping[str, str]) -> tuple[str, ...]:
    return (environ["TMPDIR"], *TEMPORARY) if environ.get("TMPDIR") else TEMPORARY


def _no_directory(error: OSError) -> LaunchError:
    return LaunchError(
        "no directory for this run",
        value=error.filename,
        source=error.strerror,
        hint="set TMPDIR to a directory that can be written",
    )


def name_private_directory(environ: Mapping[str, str]) -> str:
    """The absolute path of a directory that `make_named_directory` is to make, whose name nobody has guessed."""
    parents = _parents(environ)
    parent = next((parent for parent in parents if os.access(parent, os.W_OK | os.X_OK)), parents[0])
    return os.path.join(os.path.abspath(parent), "cpulaunch-" + os.urandom(6).hex())


def make_named_directory(path: str) -> None:
    """Effect: the directory exists, and nobody else may read it. Raises: LaunchError."""
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        raise _no_directory(error) from None


def new_directory(parent: str, prefix: str) -> str:
    """The absolute path of a new directory in `parent` whose name nobody has guessed. Raises: OSError."""
    path = os.path.join(os.path.abspath(parent), prefix + os.urandom(6).hex())
    os.mkdir(path, 0o700)
    return path


def make_event_files(directory: str, workers: Iterable[int]) -> None:
    """Effect: an empty file of events for each worker. Raises: LaunchError."""
    try:
        for worker in workers:
            os.close(os.open(events_path(directory, worker), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        hint = "set TMPDIR to a directory that can be written"
        raise LaunchError("no directory for this run", value=directory, source=error.strerror, hint=hint) from None


def events_path(directory: str, worker: int) -> str:
    """Where a worker tells what happens in it."""
    return os.path.join(directory, f"worker-{worker}.jsonl")


def with_event_files(specs: Sequence[ExecSpec], directory: str) -> tuple[ExecSpec, ...]:
    """The starts of workers that tell this run's directory what happens in them."""
    return tuple(with_variables(spec, {EVENTS_VARIABLE: events_path(directory, spec.worker)}) for spec in specs)


def remove_run_directory(directory: str) -> None:
    """Effect: nothing of the run's directory is left, as far as that is permitted."""
    try:
        with os.scandir(directory) as entries:
            for entry in list(entries):
                _remove(entry)
        os.rmdir(directory)
    except OSError:
        return  # Another process of this launch was faster.


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        remove_run_directory(entry.path)
        return
    try:
        os.unlink(entry.path)
    except OSError:
        return
