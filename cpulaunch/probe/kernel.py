"""Kernel settings that affect speed. Source: the files of /sys and /proc/sys named in each line."""

import os

from cpulaunch.probe.topology import CPU
from cpulaunch.records.host import Kernel, Permission
from cpulaunch.system.mempolicy import get_policy, has_known_numbers, set_policy
from cpulaunch.system.root import Root


def read_kernel(root: Root, *, first_cpu: int, try_mempolicy: bool) -> Kernel:
    """The settings; with `try_mempolicy`, on this machine, whether memory policies may be set."""
    balancing = root.integer("proc/sys/kernel/numa_balancing")
    return Kernel(
        release=root.text("proc/sys/kernel/osrelease"),
        transparent_hugepage=_chosen(root.text("sys/kernel/mm/transparent_hugepage/enabled")),
        numa_balancing=None if balancing is None else balancing != 0,
        governor=root.text(f"{CPU}/cpu{first_cpu}/cpufreq/scaling_governor"),
        smt=root.text(f"{CPU}/smt/control"),
        isolated_cpus=root.cpulist(f"{CPU}/isolated") or frozenset(),
        mempolicy=mempolicy_permission() if root.live and try_mempolicy else "unknown",
        page_bytes=os.sysconf("SC_PAGE_SIZE") if root.live else None,
    )


def mempolicy_permission() -> Permission:
    """Whether this process may set its memory policy, found out by setting the policy that it has.

    Containers forbid the call by a seccomp filter (EPERM); kernels without NUMA do not have it (ENOSYS).
    """
    if not has_known_numbers():
        return "unknown"
    try:
        set_policy(get_policy())
    except OSError:
        return "denied"
    return "permitted"


def _chosen(text: str | None) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    return (text or "").partition("[")[2].partition("]")[0] or None
