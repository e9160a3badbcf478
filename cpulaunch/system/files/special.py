"""Pipes and devices that take output: which they are, so that another one in their place is noticed."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    FileId: TypeAlias = tuple[int, int]
    """Device and inode; of a device, minus its kind, and its number."""


WRITING = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
TERMINAL = "/dev/tty"
"""This process's own, which every user may open. Source: tty(4)."""


def open_nonblocking(fd: int) -> int | None:
    """A new, non-blocking open file description of the same pipe or terminal, whose flags no other process shares.

    None without /proc, without a free descriptor, or where another user owns the file, but for the terminal of this
    process: after `su`, that is still the other user's.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", WRITING)
    except OSError:
        pass
    try:
        os.tcgetpgrp(fd)  # Raises for any other. Source: ioctl_tty(2), TIOCGPGRP.
        return os.open(TERMINAL, WRITING)
    except OSError:
        return None


def file_id(status: os.stat_result) -> FileId:
    """What tells special files apart: a device by its number, as its file may be made anew."""
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        return -stat.S_IFMT(status.st_mode), status.st_rdev
    return status.st_dev, status.st_ino


def keep(name: str, flags: int, *, folder: int) -> os.stat_result:
    """What has this name in the folder. Effect: keeps a descriptor of it, but not that of a closed stdin or stdout.

    While it is kept, no other file gets the same numbers. Raises: OSError.
    """
    import fcntl  # Some systems have none, nor O_PATH.

    found = os.open(name, flags, dir_fd=folder)
    try:
        return os.fstat(fcntl.fcntl(found, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        os.close(found)
