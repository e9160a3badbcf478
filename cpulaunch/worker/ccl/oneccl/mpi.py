"""The end of a rank that oneCCL has joined to the others by MPI: oneCCL leaves MPI_Finalize out where a group is kept.

mpiexec takes a rank that ends without it for one that failed, and kills the others. So a rank that ends well calls it,
and waits there for the others; one that failed does not, and the job ends at once.
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
"""Where Python keeps the exception that ends a program (the first since 3.12)."""


def finalize_at_exit(path: str) -> None:
    """Effect: when this process ends well, MPI does too, unless the program itself had started it by now."""
    library = _open_loaded(path)
    if not _flag_of(library, "MPI_Initialized"):
        atexit.register(_finalize, library, os.getpid())


def _open_loaded(path: str) -> Any:
    """The library that oneCCL uses: one of that name that is loaded already, or this."""
    for name in (os.path.basename(path), path):
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | (os.RTLD_NOLOAD if name != path else 0))
        except OSError:
            continue
    return None


def _flag_of(library: Any, function: str) -> bool:
    """Source: int MPI_Initialized(int *flag), int MPI_Finalized(int *flag)."""
    flag = ctypes.c_int()
    return library is not None and getattr(library, function)(ctypes.byref(flag)) == 0 and bool(flag)


def _finalize(library: Any, process: int) -> None:
    is_failing = any(getattr(sys, name, None) is not None for name in _FAILURES)
    if is_failing or process != os.getpid() or not _flag_of(library, "MPI_Initialized"):
        return
    if not _flag_of(library, "MPI_Finalized"):
        library.MPI_Finalize()
