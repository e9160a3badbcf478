"""The NUMA memory policy of the calling thread, by direct system calls, without numactl or libnuma."""

from __future__ import annotations

import errno
import os
import sys

from cpulaunch.records.record import record
from cpulaunch.system.libc import call, ctypes_module

MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
MPOL_PREFERRED_MANY = 5
"""Source: Linux, include/uapi/linux/mempolicy.h; PREFERRED_MANY since 5.15."""

MAX_NUMA_NODES = 1024
"""Source: Linux, NODES_SHIFT is at most 10 on every architecture."""


@record(kw_only=False)
class _Numbers:
    get: int
    set: int


SYSCALLS = {
    "x86_64": _Numbers(get=239, set=238),
    "amd64": _Numbers(get=239, set=238),
    "aarch64": _Numbers(get=236, set=237),
    "arm64": _Numbers(get=236, set=237),
    "riscv64": _Numbers(get=236, set=237),
    "loongarch64": _Numbers(get=236, set=237),
    "ppc64": _Numbers(get=260, set=261),
    "ppc64le": _Numbers(get=260, set=261),
    "s390x": _Numbers(get=269, set=270),
}
"""Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h,
arch/powerpc/kernel/syscalls/syscall.tbl, arch/s390/kernel/syscalls/syscall.tbl."""


@record
class Policy:
    """A memory policy as the kernel takes it: a mode (MPOL_…) and NUMA nodes."""

    mode: int
    numa_nodes: frozenset[int]


def get_policy() -> Policy:
    """The policy of the calling thread. Raises: OSError (EPERM, ENOSYS) where the system call is refused or missing."""
    ctypes = ctypes_module()
    mode = ctypes.c_int()
    mask = (ctypes.c_ubyte * (MAX_NUMA_NODES // 8))()
    size = ctypes.c_ulong(MAX_NUMA_NODES)
    _syscall(_numbers().get, ctypes.byref(mode), mask, size, None, ctypes.c_ulong(0))
    bits = int.from_bytes(bytes(mask), sys.byteorder) if sys.byteorder == "little" else _words(bytes(mask))
    return Policy(mode=mode.value, numa_nodes=frozenset(n for n in range(MAX_NUMA_NODES) if bits >> n & 1))


def set_policy(policy: Policy) -> None:
    """Effect: the calling thread, its future threads and children, and what it executes allocate by this policy.

    Raises: OSError (EPERM in containers, ENOSYS without NUMA, EINVAL for NUMA nodes that are not allowed).
    """
    ctypes = ctypes_module()
    bits = sum(1 << node for node in policy.numa_nodes)
    mask = (ctypes.c_ulong * (MAX_NUMA_NODES // 64))(
        *(bits >> shift & (1 << 64) - 1 for shift in range(0, MAX_NUMA_NODES, 64))
    )
    # The kernel uses one bit less than the size it is given (get_nodes() in mm/mempolicy.c), hence + 1.
    size = ctypes.c_ulong(MAX_NUMA_NODES + 1)
    _syscall(_numbers().set, ctypes.c_int(policy.mode), mask if bits else None, size if bits else ctypes.c_ulong(0))


def _words(mask: bytes) -> int:
    """The bits of a big-endian machine's array of 64-bit words, lowest word first."""
    words = (mask[at : at + 8] for at in range(0, len(mask), 8))
    return sum(int.from_bytes(word, "big") << 64 * place for place, word in enumerate(words))


def has_known_numbers() -> bool:
    """Whether the numbers of the system calls are known for this operating system and architecture."""
    return _known_numbers() is not None


def _known_numbers() -> _Numbers | None:
    if sys.maxsize < 2**32 or not sys.platform.startswith("linux"):
        return None
    return SYSCALLS.get(os.uname().machine)


def _numbers() -> _Numbers:
    """The numbers of this machine's system calls. Raises: OSError ENOSYS where they are unknown."""
    numbers = _known_numbers()
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return numbers


def _syscall(number: int, *args: object) -> None:
    call("syscall", ctypes_module().c_long(number), *args)
