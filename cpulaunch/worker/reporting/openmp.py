"""Which of several OpenMP runtimes in this process runs the threads of torch."""

from __future__ import annotations

import os


def active_runtime() -> str | None:
    """The path of the library whose OpenMP functions torch calls; None if it has none.

    Searched as the dynamic linker does for torch: first in the global scope, which holds preloads and what torch loads
    for all libraries, then in libtorch_cpu.so and what it needs. Source: ld.so(8), dlopen(3), dladdr(3).
    """
    import ctypes

    class Symbol(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    found = Symbol()
    for library in (None, "libtorch_cpu.so"):
        try:
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            if ctypes.CDLL(None).dladdr(loaded.omp_get_max_threads, ctypes.byref(found)):
                return os.path.realpath(os.fsdecode(found.file))
        except (OSError, AttributeError):
            continue
    return None
