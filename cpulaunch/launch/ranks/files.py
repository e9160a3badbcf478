"""The files of a job's ranks, where torchrun puts them: DIR/RUNID_xxxx/attempt_N/LOCALRANK.

Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py, DefaultLogsSpecs.
"""

from __future__ import annotations

import os

from cpulaunch.launch.process.run_directory import choose_private_path, make_unique_directory, remove_run_directory
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class RunFolder:
    """The folder with the directories of all attempts of a job; `path` None: none are written (--log-dir /dev/null).

    `kept`: the user wants its files; else it is removed when the job has ended. `private`: it is made by the process
    that starts the ranks.
    """

    path: str | None
    kept: bool
    private: bool = False


@record(kw_only=False)
class RankFiles:
    """The directory of one attempt, with a directory for each rank in it; None: no files are written."""

    directory: str | None

    def of_rank(self, local_rank: int, name: str) -> str:
        """The path of a rank's file; "" if no files are written."""
        return "" if self.directory is None else os.path.join(self.directory, str(local_rank), name)

    def error_file(self, local_rank: int) -> str:
        """The path of the file for torch's @record; "" if no files are written, as under torchrun."""
        return self.of_rank(local_rank, "error.json")


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
        os.makedirs(log_dir, exist_ok=True)
        return RunFolder(path=make_unique_directory(log_dir, f"{run_id.replace(os.sep, '_')}_"), kept=True)
    except OSError as error:
        raise log_error(log_dir, error) from None


def rank_files(folder: RunFolder, *, restarts: int) -> RankFiles:
    """The paths of an attempt's files. Effect: none."""
    return RankFiles(None if folder.path is None else os.path.join(folder.path, f"attempt_{restarts}"))


def make_rank_files(folder: RunFolder, *, restarts: int, ranks: int) -> RankFiles:
    """The paths of an attempt's files. Effect: makes its directories, new and empty. Raises: LaunchError."""
    files = rank_files(folder, restarts=restarts)
    directory = files.directory
    if directory is None:
        return files
    if os.path.isdir(directory):
        remove_run_directory(directory)  # Of an attempt that lost its port and is repeated.
    try:
        os.mkdir(directory)
        for local_rank in range(ranks):
            os.mkdir(os.path.join(directory, str(local_rank)))
    except OSError as error:
        raise log_error(directory, error) from None
    return files


def log_error(path: str, error: OSError) -> LaunchError:
    """The error for a log that cannot be written."""
    hint = "--log-dir needs a writable directory"
    return LaunchError("log cannot be written", value=error.filename or path, source=error.strerror, hint=hint)
