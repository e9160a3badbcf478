"""The run directory: the workers' event files and the ranks' error files; removed when the run is over."""

from __future__ import annotations

import os

from cpulaunch.launch.process.exec_spec import ExecSpec, with_variables
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ARRIVALS, GATE = "arrivals", "gate"
"""The start barrier's named pipes: the same names as in worker/reporting/barrier.py."""

TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp", ".")
"""Parents to try after TMPDIR, which may be gone, as that of a batch job.

Source: Python's tempfile, whose import takes as long as planning.
"""


def make_private_directory(environ: Mapping[str, str]) -> str:
    """The absolute path of a new directory that only its owner can read. Raises: LaunchError."""
    failures = []
    for parent in _parents(environ):
        try:
            return make_unique_directory(parent, "cpulaunch-")
        except OSError as error:
            failures.append(error)
    raise _directory_error(failures[0])


def make_unique_directory(parent: str, prefix: str) -> str:
    """The absolute path of a new directory in `parent` that only its owner can read. Raises: OSError."""
    path = _unique_path(parent, prefix)
    os.mkdir(path, 0o700)
    return path


def choose_private_path(environ: Mapping[str, str]) -> str:
    """The absolute path, with a random name, of a directory that `make_private_path` can make later."""
    parents = _parents(environ)
    return _unique_path(next((parent for parent in parents if _takes_files(parent)), parents[0]), "cpulaunch-")


def _takes_files(parent: str) -> bool:
    """Whether files can be made in this directory; permissions alone do not tell, /proc has them for root.

    Effect: makes a file without a name, which ends with its descriptor. Source: open(2), O_TMPFILE.
    """
    if not os.access(parent, os.W_OK | os.X_OK):
        return False
    try:
        if hasattr(os, "O_TMPFILE"):
            os.close(os.open(parent, os.O_TMPFILE | os.O_WRONLY, 0o600))
            return True
    except OSError:
        pass  # The file system has no such files, or none at all.
    try:
        path = make_unique_directory(parent, "cpulaunch-")
        os.rmdir(path)
    except OSError:
        return False
    return True


def make_private_path(path: str) -> None:
    """Effect: makes this directory, which only its owner can read. Raises: LaunchError."""
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        raise _directory_error(error) from None


def _parents(environ: Mapping[str, str]) -> tuple[str, ...]:
    return (environ["TMPDIR"], *TEMPORARY) if environ.get("TMPDIR") else TEMPORARY


def _unique_path(parent: str, prefix: str) -> str:
    return os.path.join(os.path.abspath(parent), prefix + os.urandom(6).hex())


def _directory_error(error: OSError) -> LaunchError:
    return LaunchError(
        "cannot create the files of this run",
        value=error.filename,
        source=error.strerror,
        hint="set TMPDIR to a writable directory",
    )


def make_event_files(directory: str, workers: Iterable[int]) -> None:
    """Effect: makes an empty event file for each worker. Raises: LaunchError."""
    try:
        for worker in workers:
            os.close(os.open(events_path(directory, worker), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _directory_error(error) from None


def events_path(directory: str, worker: int) -> str:
    """The path of a worker's event file, one JSON object a line."""
    return os.path.join(directory, f"worker-{worker}.jsonl")


def with_event_files(specs: Sequence[ExecSpec], directory: str) -> tuple[ExecSpec, ...]:
    """The specs, each with the variable that names the worker's event file in this run directory."""
    return tuple(with_variables(spec, {EVENTS_VARIABLE: events_path(directory, spec.worker)}) for spec in specs)


def remove_run_directory(directory: str) -> None:
    """Effect: removes the directory and what is in it, as far as permissions allow."""
    try:
        with os.scandir(directory) as entries:
            for entry in list(entries):
                _remove(entry)
        os.rmdir(directory)
    except OSError:
        return  # Another process of this launch has removed it.


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        remove_run_directory(entry.path)
        return
    try:
        os.unlink(entry.path)
    except OSError:
        return
