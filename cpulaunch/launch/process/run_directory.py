"""The run directory: the workers' event files and the ranks' error files; removed when the run is over.

So is everything else that a launch makes.
"""

from __future__ import annotations

import errno
import fcntl
import os

from cpulaunch.launch.process.descriptors import fd_shortage_error
from cpulaunch.launch.process.exec_spec import ExecSpec, with_variables
from cpulaunch.records.errors import LaunchError, NoSpaceError
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.control_group import kill_cgroup, remove_cgroup
from cpulaunch.system.files.folders import (
    make_folder,
    make_secure_folder,
    remove_if_empty,
    remove_path,
    remove_renamed,
    unpredictable,
)
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.trust import is_secure, secure_path
from cpulaunch.system.files.writing import create, create_unnamed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ARRIVALS, GATE = "arrivals", "gate"
"""The start barrier's named pipes: the same names as in worker/reporting/barrier.py."""

TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm", ".")
"""Parents to try after TMPDIR, which may be gone, as that of a batch job; a container may have no other than /dev/shm.

Source: Python's tempfile, whose import takes as long as planning.
"""

PREFIX, RANDOM_DIGITS, DIGITS = "cpulaunch-", 12, frozenset("0123456789abcdef")
"""Of the name of a run's directory."""

PROBE_BYTES = 1 << 16
"""A folder into which these do not fit is full."""

_locked: dict[str, int] = {}
"""The descriptors of the directories that this process has made, by which they are locked."""


@record
class Remains:
    """What is left of a launch whose supervisor was killed: run directory, cgroup, an empty directory for logs.

    The supervisor or the inner guard makes them, under names that were chosen before: so whenever a process is killed,
    there is another one that knows what to remove. `has_launches`: the supervisor measures launches, which remove their
    own files when they end with it.
    """

    directory: str | None
    cgroup: str | None
    logs: str | None
    has_launches: bool

    @property
    def directories(self) -> frozenset[str]:
        """The paths of the run's directory and of that of its logs, as far as there are any."""
        return frozenset(path for path in (self.directory, self.logs) if path is not None)

    def kill_cgroup(self) -> None:
        """Effect: kills every process in the cgroup."""
        if self.cgroup is not None:
            kill_cgroup(self.cgroup)

    def remove(self) -> None:
        """Effect: the run's directory, its cgroup and an empty directory for its logs do not exist."""
        if self.cgroup is not None:
            remove_cgroup(self.cgroup)
        if self.directory is not None:
            remove_path(self.directory)
        if self.logs is not None:
            remove_if_empty(self.logs)


def make_unique_directory(parent: str, prefix: str) -> str:
    """The absolute path of a new directory in `parent` that only its owner can read. Raises: OSError."""
    path = _unique_path(parent, prefix)
    name, folder = in_run_directory(path)
    os.close(make_folder(name, folder=folder))
    return path


def choose_private_path(environ: Mapping[str, str]) -> str:
    """The absolute path, with a random name, of a directory that `make_private_path` can make later.

    It is where files keep their owner, if there is such a place. Effect: makes a folder in cpulaunch's caches where no
    other parent is secure and takes files: another user may have filled those that all share.
    """
    for parents in (_safe_parents, _open_parents):
        for is_usable in (_keeps_owner, _takes_files):
            if (parent := next(filter(is_usable, parents(environ)), None)) is not None:
                return _unique_path(parent, PREFIX)
        if any(map(_may_write, _parents(environ))):
            break
    return _unique_path(environ.get("TMPDIR") or TEMPORARY[0], PREFIX)


def _safe_parents(environ: Mapping[str, str]) -> Iterator[str]:
    """The parents, and the folder in this user's caches at last. Effect: makes that, once it is asked for."""
    yield from _parents(environ)
    from cpulaunch.system.files.caches import user_cache  # Few launches need it.

    path = user_cache("run", environ)
    try:
        folder = make_secure_folder(path, users_group=True) if os.path.isabs(path) else None
    except OSError:
        return
    if folder is not None:
        yield folder


def _open_parents(environ: Mapping[str, str]) -> Iterator[str]:
    """The folders, without links, that may hold the files of a run, though everyone may write them."""
    for path in _places(environ):
        try:
            resolved = os.path.realpath(path)
            if _may_hold(resolved):
                yield resolved
        except OSError:
            continue


def _may_write(parent: str) -> bool:
    """Whether permissions let this user make files in the directory, be it full."""
    return os.access(parent, os.W_OK | os.X_OK)


def _takes_files(parent: str) -> bool:
    """Whether files can be made in this directory and hold data: permissions do not tell, /proc has them for root."""
    return _owner_of_new(parent) is not None


def _keeps_owner(parent: str) -> bool:
    """Whether files that are made there are this user's: on a share that maps users, they are another one's."""
    return _owner_of_new(parent) == os.geteuid()


def _owner_of_new(parent: str) -> int | None:
    """The owner of files that are made in this directory; None if none can be made or hold data."""
    if not _may_write(parent):
        return None
    try:
        return _write_probe(parent)
    except OSError as error:
        return os.geteuid() if error.errno == errno.EFBIG else None  # The limit of this process, RLIMIT_FSIZE.


def _write_probe(parent: str) -> int:
    """The owner of a new file. Effect: none that lasts, as the file has no name. Raises: OSError."""
    fd, left = create_unnamed(parent), PROBE_BYTES
    try:
        while left:
            left -= os.write(fd, bytes(left))
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def check_space(folder: str) -> None:
    """Raises: NoSpaceError if the folder is full; nothing where it is gone, or cannot be written for another reason."""
    try:
        _write_probe(folder)
    except OSError as error:
        if is_full(error):
            raise _directory_error(OSError(error.errno, error.strerror, folder)) from None


def make_private_path(path: str) -> int:
    """The descriptor, until `remove_run_directory`, of a directory that only its owner can read.

    Effect: makes the directory, and locks it. Raises: LaunchError. Also if other users can replace it, unless there is
    no other place, by permissions: a Kubernetes emptyDir may be the only folder that can be written. Places that are
    full count, as another user may have filled them. What removes old files passes over what is locked; otherwise
    another user could make the directory again, under its name. Source: tmpfiles.d(5).
    """
    try:
        folder = make_folder(path)
        try:
            made, found = os.fstat(folder), os.stat(path, follow_symlinks=False)
            # Of the parent, as what is made on a share, or in a user namespace, may show another owner.
            if not (os.path.samestat(found, made) and _may_hold(os.path.dirname(path))):
                remove_if_empty(path)
                raise PermissionError(errno.EPERM, "other users can replace it", path)
        except OSError:
            os.close(folder)
            raise
    except OSError as error:
        raise _directory_error(error) from None
    _locked[path] = folder
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # Not every file system has such locks.
        return folder
    return folder


def make_spare_folder(environ: Mapping[str, str]) -> str:
    """The path of a new private folder, for what the run directory has no space for. Raises: LaunchError."""
    path = choose_private_path(environ)
    make_private_path(path)
    return path


def is_full(error: OSError) -> bool:
    """Whether there was no space: blocks, inodes, or what a quota allows of them."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _may_hold(parent: str) -> bool:
    """Whether the files of a run may be in this folder, a path without links. Raises: OSError."""
    if is_secure(parent):
        return True
    is_own = os.stat(parent, follow_symlinks=False).st_uid in (0, os.geteuid())
    return is_own and not any(map(_may_write, _parents({})))


def _places(environ: Mapping[str, str]) -> tuple[str, ...]:
    return (environ["TMPDIR"], *TEMPORARY) if environ.get("TMPDIR") else TEMPORARY


def _parents(environ: Mapping[str, str]) -> Iterator[str]:
    """The parents, without links, in which no other user can replace a directory: workers open files by paths.

    What a link of another user leads to is none. Each is looked at when it is asked for: mostly the first one will do.
    """
    for path in _places(environ):
        try:
            folder = open_folder(path)
        except OSError:
            continue
        resolved = secure_path(path, folder)
        os.close(folder)
        if resolved is not None:
            yield resolved


def _unique_path(parent: str, prefix: str) -> str:
    return os.path.join(os.path.abspath(parent), unpredictable(prefix))


def _directory_error(error: OSError) -> LaunchError:
    shortage = fd_shortage_error(error)
    if isinstance(shortage, LaunchError):
        return shortage
    kind = NoSpaceError if is_full(error) else LaunchError
    return kind(
        "cannot create the files of this run",
        value=error.filename,
        source=error.strerror,
        hint="set TMPDIR to a writable directory that only you can change",
    )


def make_event_files(directory: str, workers: Iterable[int]) -> None:
    """Effect: makes an empty event file for each worker. Raises: LaunchError."""
    try:
        for worker in workers:
            name, folder = in_run_directory(events_path(directory, worker))
            os.close(create(name, folder=folder))
    except OSError as error:
        raise _directory_error(error) from None


def make_events_directory(parent: str, workers: Iterable[int]) -> str:
    """A new directory in `parent` with an empty event file for each worker. Raises: LaunchError.

    `parent` may be gone: a worker of the attempt before may have removed it.
    """
    try:
        directory = make_unique_directory(parent, "events-")
    except OSError as error:
        raise _directory_error(error) from None
    make_event_files(directory, workers)
    return directory


def events_path(directory: str, worker: int) -> str:
    """The path of a worker's event file, one JSON object a line."""
    return os.path.join(directory, f"worker-{worker}.jsonl")


def arrival_path(directory: str, worker: int) -> str:
    """The path of a file that a worker makes when it arrives at the start barrier."""
    return f"{events_path(directory, worker)}.arrived"


def with_event_files(specs: Sequence[ExecSpec], directory: str) -> tuple[ExecSpec, ...]:
    """The specs, each with the variable that names the worker's event file in this run directory."""
    return tuple(with_variables(spec, {EVENTS_VARIABLE: events_path(directory, spec.worker)}) for spec in specs)


def is_run_directory(path: str) -> bool:
    """Whether a path has the name of a run's directory, as `choose_private_path` gives it."""
    name = os.path.basename(path)
    digits = name.removeprefix(PREFIX)
    return digits != name and len(digits) == RANDOM_DIGITS and DIGITS.issuperset(digits)


def in_run_directory(path: str) -> tuple[str, int | None]:
    """The name of a file in a run's directory, and this process's descriptor of that; the path if it has none.

    Another user may rename the directory, or exchange it, where there was no place in which none can.
    """
    for directory, fd in _locked.items():
        if path.startswith(f"{directory}/"):
            return path.removeprefix(f"{directory}/"), fd
    return path, None


def remove_run_directory(directory: str) -> None:
    """Effect: removes the directory and what is in it, as far as permissions allow, and unlocks it."""
    remove_path(directory)
    if directory in _locked:
        remove_renamed(_locked[directory], path=directory)
        os.close(_locked.pop(directory))
