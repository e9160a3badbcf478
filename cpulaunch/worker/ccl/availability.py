"""Whether this machine can run the backend "ccl", as far as one process can determine without the others."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.worker.ccl.oneccl.library import folder
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MACHINE = ("linux", "x86_64")
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
ADMINISTRATORS_ONLY = 2
"""The lowest ptrace_scope at which only administrators may read other processes. Source: kernel, LSM/Yama.rst."""


def check_machine(system: str, architecture: str) -> None:
    """Raises: CclError unless this is x86-64 Linux, which oneCCL and the shared barrier need."""
    if (system, architecture) != MACHINE:
        raise CclError(f"the ccl backend supports x86-64 Linux only, not {architecture} {system}\nhint: use gloo")


def is_available(environ: Mapping[str, str]) -> bool:
    """Whether this machine supports a path that the environment allows (CPULAUNCH_CCL_PATH)."""
    if (sys.platform, platform.machine()) != MACHINE:
        return False
    requested = environ.get(PATH_VARIABLE) or "auto"
    return (requested != "oneccl" and may_access_peers()) or (requested != "memory" and has_oneccl())


def has_oneccl() -> bool:
    """Whether oneCCL is installed."""
    try:
        return bool(folder())
    except CclError:
        return False


def may_access_peers(yama: str = YAMA) -> bool:
    """Whether the kernel permits processes of one user to access each other's memory.

    Source: process_vm_readv(2), which a seccomp filter refuses even if the caller reads no bytes of its own memory.
    """
    read = ctypes.CDLL(None).process_vm_readv
    if read(os.getpid(), None, 0, None, 0, 0) != 0:
        return False
    try:
        with open(yama, encoding="ascii") as file:
            return int(file.read()) < ADMINISTRATORS_ONLY
    except OSError:
        return True  # The kernel has no Yama.
