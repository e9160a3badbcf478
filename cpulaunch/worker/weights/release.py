"""`--release-weights`: the memory of original weights that a form replaces, given back to the system.

The pages of a weight are written to an unnamed file and mapped from it at the same address, so that values, pointers
and shared storages stay as they are. Pages that are not read stay on disk. A write makes a private copy of its page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from torch import Tensor

from cpulaunch.system.files.writing import create_unnamed

MAP_PRIVATE, MAP_FIXED = 0x02, 0x10
"""Source: Linux, include/uapi/asm-generic/mman-common.h."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_TMPFS = 0x01021994
"""Source: Linux, include/uapi/linux/magic.h."""


def release(weight: Tensor, folder: str) -> int:
    """Bytes of the weight's memory that are now pages of a file in `folder`; 0 if the weight has no whole page.

    Raises: OSError if the folder is in memory or cannot be written, or mapping fails.
    """
    start, length = _whole_pages(weight)
    if length <= 0:
        return 0
    if _reuses_mappings():
        raise OSError("the memory allocator takes pages that it gave back for zeros, which those of a file are not")
    if _is_in_memory(folder):
        raise OSError(f"{folder} is in memory itself")
    file = create_unnamed(folder)
    try:
        view = memoryview((ctypes.c_char * length).from_address(start)).cast("B")
        written = 0
        while written < length:
            written += os.write(file, view[written : written + (1 << 28)])
        os.fdatasync(file)
        _map_file(start, length, file)
    finally:
        os.close(file)
    return length


def _reuses_mappings() -> bool:
    """Whether malloc is jemalloc or mimalloc.

    jemalloc keeps the mappings of freed memory, and its calloc returns them after MADV_DONTNEED without writing zeros.
    Source: jemalloc, src/extent.c, extent_dalloc_wrapper. mimalloc keeps them too.
    """
    loaded = ctypes.CDLL(None)
    return hasattr(loaded, "mallctl") or hasattr(loaded, "mi_malloc")


def _whole_pages(weight: Tensor) -> tuple[int, int]:
    """Address and length of the pages that only this weight occupies; it is contiguous."""
    address = weight.data_ptr()
    end = address + weight.nbytes
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, end // mmap.PAGESIZE * mmap.PAGESIZE - start


def _map_file(start: int, length: int, fd: int) -> None:
    """Effect: replaces the pages from `start` on by those of the file, in one step. Raises: OSError."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, length, protection, MAP_PRIVATE | MAP_FIXED, fd, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map weights: {os.strerror(number)}")


def _is_in_memory(folder: str) -> bool:
    """Whether the folder's file system keeps files in memory. Source: statfs(2)."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 32)()
    if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)):
        return False
    return int(buffer[0]) == _TMPFS
