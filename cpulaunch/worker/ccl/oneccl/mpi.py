"""MPI_Finalize at the exit of a rank that oneCCL connects to the others by MPI; oneCCL omits it if a group exists.

mpiexec considers a rank that exits without MPI_Finalize failed, and kills the others. So a rank that succeeds calls it,
which waits for the others; a rank that fails does not call it, and the job ends at once.
Source: MPI standard 4.1, section 11.2.2; Intel MPI's Hydra.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FAILURES = ("last_exc", "last_type")
"""Attributes of `sys` with the exception that ended the program (the first since Python 3.12)."""


def finalize_at_exit(path: str) -> None:
    """Effect: calls MPI_Finalize when this process exits without an error, unless the program itself initialised MPI.

    `path` is that of the MPI library. Call this before oneCCL initialises MPI.
    """
    library = _open_loaded(path)
    if not _flag_of(library, "MPI_Initialized"):
        atexit.register(_finalize, library, os.getpid())


def _open_loaded(path: str) -> Any:
    """The MPI library that oneCCL uses: a loaded one of that name, else the one at `path`; None if neither exists."""
    for name in (os.path.basename(path), path):
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | (os.RTLD_NOLOAD if name != path else 0))
        except OSError:
            continue
    return None


def _flag_of(library: Any, function: str) -> bool:
    """The flag that MPI_Initialized(int *flag) or MPI_Finalized(int *flag) sets; False without a library."""
    flag = ctypes.c_int()
    return library is not None and getattr(library, function)(ctypes.byref(flag)) == 0 and bool(flag)


def _finalize(library: Any, process: int) -> None:
    is_failing = any(getattr(sys, name, None) is not None for name in _FAILURES)
    if is_failing or process != os.getpid() or not _flag_of(library, "MPI_Initialized"):
        return
    if not _flag_of(library, "MPI_Finalized"):
        library.MPI_Finalize()
