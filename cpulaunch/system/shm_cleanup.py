"""Shared memory that a killed process could not remove itself. Imported only after a worker was killed."""

from __future__ import annotations

import os

SHARED_FOLDER = "/dev/shm"


def remove_shared_memory(pid: int, folder: str = SHARED_FOLDER) -> None:
    """Effect: removes files named after a process: 25 MB for each rank of oneCCL, 1 KB of Intel OpenMP.

    Call it after the process has ended and before it is reaped: until then its id is not given to another process.
    Source: libfabric, whose shm provider names a region PID:UID:NUMBER; openmp/runtime/src/kmp_runtime.cpp,
    __kmp_reg_status_name.
    """
    region, registered = f"{pid}:{os.getuid()}:", f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}"
    try:
        names = [name for name in os.listdir(folder) if name.startswith(region) or name == registered]
    except OSError:
        return
    for name in names:
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            continue
