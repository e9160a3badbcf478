"""What a killed process could not remove itself. A launch imports it only when a worker was killed."""

from __future__ import annotations

import os

SHARED_FOLDER = "/dev/shm"


def remove_shared_memory(pid: int, folder: str = SHARED_FOLDER) -> None:
    """Effect: the memory that libfabric named after a process, some 25 MB for a rank of oneCCL, is given back.

    The process must have ended, and its number not been given to another: its parent has not asked for it yet.
    Source: libfabric, the shm provider names a region PID:UID:NUMBER.
    """
    mark = f"{pid}:{os.getuid()}:"
    try:
        names = [name for name in os.listdir(folder) if name.startswith(mark)]
    except OSError:
        return
    for name in names:
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            continue
