"""The files of a job's ranks, where torchrun puts them: DIR/RUNID_xxxx/attempt_N/LOCALRANK.

Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py, DefaultLogsSpecs.
"""

from __future__ import annotations

import os

from cpulaunch.launch.process.descriptors import MORE_DESCRIPTORS, is_fd_shortage
from cpulaunch.launch.process.run_directory import (
    choose_private_path,
    in_run_directory,
    is_full,
    make_unique_directory,
)
from cpulaunch.launch.supervision.error_file import MAX_BYTES
from cpulaunch.records.errors import LEAVE_FOLDERS, LaunchError, NoSpaceError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record, replace
from cpulaunch.system.files.folders import make_folder, open_own, remove_folder, unpredictable
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.reading import read_start
from cpulaunch.system.files.trust import secure_path
from cpulaunch.system.files.writing import create, create_with

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ERROR_FILE = "error.json"
LOG_HINT = "--log-dir needs a writable directory"


@record
class RunFolder:
    """The folder with the directories of all attempts of a job; `path` None: none are written (--log-dir /dev/null).

    `kept`: the user wants its files; else it is removed when the job has ended. `private`: it is made by the process
    that starts the ranks. `fd`: its descriptor, through which everything in it is made and removed, because others may
    replace what a path names. `secure`: they cannot.
    """

    path: str | None
    kept: bool
    private: bool = False
    fd: int | None = None
    secure: bool = True


@record(kw_only=False)
class RankFiles:
    """The directory of one attempt, with a directory for each rank in it; None: no files are written.

    `fd`: its descriptor. `errors`: the directory with the error files of this many `ranks`, where it is another one.
    """

    directory: str | None
    fd: int | None = None
    errors: str | None = None
    ranks: int = 0

    def of_rank(self, local_rank: int, name: str) -> str:
        """The path of a rank's file; "" if no files are written."""
        return "" if self.directory is None else os.path.join(self.directory, str(local_rank), name)

    def error_file(self, local_rank: int) -> str:
        """The path of the file for torch's @record; "" if no files are written, as under torchrun."""
        if self.errors is not None:
            return os.path.join(self.errors, f"error-{local_rank}.json")
        return self.of_rank(local_rank, ERROR_FILE)

    def opened_error_file(self, local_rank: int) -> tuple[str, int | None]:
        """The name of a rank's error file, and the descriptor of a folder that it is in; the path if there is none."""
        if self.errors is None and self.fd is not None:
            return os.path.join(str(local_rank), ERROR_FILE), self.fd
        return in_run_directory(self.error_file(local_rank))

    def open_log(self, name: str) -> int:
        """A descriptor of a new file in the directory, or in that of a rank. Raises: OSError.

        Where another user owns the directory, as on a share that maps users, a link may be in place of a rank's one.
        """
        directory, name = os.path.split(name)
        folder = self.fd if not directory or self.fd is None else open_own(directory, folder=self.fd)
        try:
            return create(name, mode=0o666, folder=folder)
        finally:
            if folder is not None and folder != self.fd:
                os.close(folder)

    def close(self) -> None:
        """Effect: the error files are in the ranks' directories, and the descriptor is closed."""
        if self.fd is None:
            return
        for local_rank in range(0 if self.errors is None else self.ranks):
            try:
                self._copy_error_file(local_rank)
            except OSError:
                continue  # The rank has recorded no error, or some rank has removed a folder.
        os.close(self.fd)

    def _copy_error_file(self, local_rank: int) -> None:
        name, folder = self.opened_error_file(local_rank)
        data = read_start(name, max_bytes=MAX_BYTES, folder=folder)
        directory = open_own(str(local_rank), folder=self.fd)
        try:
            create_with(ERROR_FILE, data, folder=directory)
        finally:
            os.close(directory)


def writes_logs(plan: LaunchPlan, job: JobPlan) -> bool:
    """Whether the output of some rank goes to a file."""
    return plan.launch.log_dir != os.devnull and any((*job.streams.redirects, *job.streams.tee))


def make_run_folder(plan: LaunchPlan, job: JobPlan, *, environ: Mapping[str, str], run_id: str) -> RunFolder:
    """The folder for this run. Effect: makes it in the user's --log-dir, if there is one. Raises: LaunchError."""
    log_dir = plan.launch.log_dir
    if log_dir is None:
        return RunFolder(path=choose_private_path(environ), kept=writes_logs(plan, job), private=True)
    if log_dir == os.devnull:
        return RunFolder(path=None, kept=False)
    try:
        return _folder_in(log_dir, f"{run_id.replace(os.sep, '_')}_")
    except OSError as error:
        raise log_error(log_dir, error) from None


def _folder_in(log_dir: str, prefix: str) -> RunFolder:
    """A new folder in the user's one. Raises: OSError."""
    parent = open_folder(log_dir, make=0o777)
    try:
        name = unpredictable(prefix)
        fd = make_folder(name, folder=parent)
    finally:
        os.close(parent)
    path = os.path.join(log_dir, name)
    secure = secure_path(path, fd)  # A share may have given it to another user, as NFS does with root's.
    return RunFolder(path=secure or os.path.abspath(path), kept=True, fd=fd, secure=secure is not None)


def rank_files(folder: RunFolder, *, restarts: int) -> RankFiles:
    """The paths of an attempt's files. Effect: none."""
    return RankFiles(None if folder.path is None else os.path.join(folder.path, f"attempt_{restarts}"))


def make_rank_files(folder: RunFolder, *, restarts: int, ranks: int, private: str | None = None) -> RankFiles:
    """The files of an attempt. Effect: makes its directories, new and empty. Raises: LaunchError.

    torch writes the error files by their paths, so they are in the `private` directory unless the folder is secure.
    """
    files = rank_files(folder, restarts=restarts)
    if files.directory is None or folder.fd is None:
        return files
    name = os.path.basename(files.directory)
    remove_folder(name, folder=folder.fd)  # Of an attempt that lost its port, or what a rank has put there.
    fd = None
    try:
        fd = make_folder(name, folder=folder.fd)
        for local_rank in range(ranks):
            os.close(make_folder(str(local_rank), folder=fd))
        errors = None if folder.secure or private is None else make_unique_directory(private, "errors-")
    except OSError as error:
        if fd is not None:
            os.close(fd)
        hint = LEAVE_FOLDERS if folder.private else LOG_HINT
        raise log_error(files.directory, error, hint=hint) from None
    return replace(files, fd=fd, errors=errors, ranks=ranks)


def log_error(path: str, error: OSError, *, hint: str = LOG_HINT) -> LaunchError:
    """The error for a log that cannot be written."""
    if is_fd_shortage(error):
        hint = MORE_DESCRIPTORS
    kind, hint = (NoSpaceError, "free space, or set TMPDIR or --log-dir") if is_full(error) else (LaunchError, hint)
    return kind("log cannot be written", value=error.filename or path, source=error.strerror, hint=hint)
