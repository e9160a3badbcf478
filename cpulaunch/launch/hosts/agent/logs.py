"""Where torch's agent writes logs. It works by paths, and another user may put links where these lead.

In a folder that others can change, the agent gives torch the path of a descriptor: that of a folder for this run alone.
"""

from __future__ import annotations

import os

from cpulaunch.launch.ranks.files import log_error
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record
from cpulaunch.system.files.folders import make_folder, owner_of_new_files, unpredictable
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.trust import secure_path


@record
class LogFolder:
    """The path of the folder for torch. `shown`: where it is, if it is for this run alone; else torch makes one in it.

    The folder for this run alone is open as long as this process runs.
    """

    path: str
    shown: str | None = None


def open_log_folder(log_dir: str, run_id: str) -> LogFolder:
    """Where torch may write. Effect: makes the folder. Raises: LaunchError."""
    if log_dir == os.devnull:
        return LogFolder(path=log_dir)
    try:
        folder = open_folder(log_dir, make=0o777)
        try:
            _check_owner(log_dir, folder)
            secure = secure_path(log_dir, folder)
            return _own_folder(log_dir, folder, run_id) if secure is None else LogFolder(path=secure)
        finally:
            os.close(folder)
    except OSError as error:
        raise log_error(log_dir, error) from None


def _check_owner(log_dir: str, folder: int) -> None:
    """Raises: LaunchError if another user owns what this one writes there, and so may put links in its place."""
    if (owner := owner_of_new_files(folder)) != os.geteuid():
        raise LaunchError(
            "logs of torch's agent cannot be on a share that gives your files to another user",
            value=log_dir,
            source=f"user {owner}",
            hint="give a --log-dir on another file system, or run as that user",
        )


def _own_folder(log_dir: str, folder: int, run_id: str) -> LogFolder:
    descriptors = f"/proc/{os.getpid()}/fd"  # Not self: the ranks open their error files.
    if not os.path.isdir(f"{descriptors}/{folder}"):
        raise LaunchError(
            "other users can change the folder of the logs",
            value=log_dir,
            source="without /proc, torch's agent writes there by paths",
            hint="give a --log-dir that only you can write",
        )
    name = unpredictable(f"{run_id.replace(os.sep, '_')}_")
    fd = make_folder(name, folder=folder)
    return LogFolder(path=f"{descriptors}/{fd}", shown=os.path.join(os.path.abspath(log_dir), name))
