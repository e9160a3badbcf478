"""Kernel settings that change speed. Source: /sys and /proc/sys, as named in each line."""

import os

from cpulaunch.probe.topology import CPU
from cpulaunch.records.host import Kernel, Permission
from cpulaunch.system.root import Root

SYSTEM_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237), "riscv64": (236, 237), "loongarch64": (236, 237)}
"""Numbers of get_mempolicy and set_mempolicy (kernel, syscall tables). Others: the permission stays unknown."""

MAX_NODES = 1024


def read_kernel(root: Root, *, first_cpu: int, arch: str, try_mempolicy: bool) -> Kernel:
    """The settings; with `try_mempolicy`, on this machine, whether memory policies may be set."""
    balancing = root.integer("proc/sys/kernel/numa_balancing")
    return Kernel(
        release=root.text("proc/sys/kernel/osrelease"),
        transparent_hugepage=_chosen(root.text("sys/kernel/mm/transparent_hugepage/enabled")),
        numa_balancing=None if balancing is None else balancing != 0,
        governor=root.text(f"{CPU}/cpu{first_cpu}/cpufreq/scaling_governor"),
        smt=root.text(f"{CPU}/smt/control"),
        isolated_cpus=root.cpulist(f"{CPU}/isolated") or frozenset(),
        mempolicy=mempolicy_permission(arch) if root.live and try_mempolicy else "unknown",
        page_bytes=os.sysconf("SC_PAGE_SIZE") if root.live else None,
    )


def mempolicy_permission(arch: str) -> Permission:
    """Whether this process may set its memory policy: tried by setting the one it has.

    Containers forbid it by a seccomp filter (EPERM); kernels without NUMA have no such call (ENOSYS).
    """
    numbers = SYSTEM_CALLS.get(arch)
    if numbers is None:
        return "unknown"
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).syscall
    mode = ctypes.c_int()
    mask = (ctypes.c_ulong * (MAX_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    limit = ctypes.c_ulong(MAX_NODES)
    if call(numbers[0], ctypes.byref(mode), mask, limit, None, 0):
        return "denied"
    return "denied" if call(numbers[1], mode, mask if any(mask) else None, limit) else "permitted"


def _chosen(text: str | None) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    return (text or "").partition("[")[2].partition("]")[0] or None
