"""The limits of this process (affinity, cpuset, CPU quota, memory) and the budget that they leave."""

from __future__ import annotations

import os

from cpulaunch.probe.cgroups import Cgroups
from cpulaunch.records.cpulist import format_cpulist, parse_cpulist, parse_cpumask
from cpulaunch.records.host import Budget, Limits, Quota
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page below 2**63."""

CPUSET_FILES = {2: ("cpuset.cpus.effective",), 1: ("cpuset.effective_cpus", "cpuset.cpus", "cpus")}
MEMSET_FILES = {2: ("cpuset.mems.effective",), 1: ("cpuset.effective_mems", "cpuset.mems", "mems")}

Named = tuple[frozenset[int], str]
"""A set of ids and the file that it was read from."""


def read_limits(root: Root, online: frozenset[int], cgroups: Cgroups) -> Limits:
    """The limits of this process, or of the one that captured the root's /proc/self."""
    allowed = _inherited(root, online)
    affinity = allowed & online or online
    cpuset = _tightest_set(root, cgroups, CPUSET_FILES)
    quota = read_quota(root, cgroups)
    memory = read_memory_limit(root, cgroups)
    nodes = _status_ids(root, "Mems_allowed") or (_tightest_set(root, cgroups, MEMSET_FILES) or (None,))[0]
    return Limits(
        affinity=affinity,
        cpuset=cpuset[0] if cpuset else None,
        memory_nodes=nodes,
        quota=quota,
        memory_bytes=memory[0] if memory else None,
        memory_source=memory[1] if memory else None,
        memory_events=_memory_events(root, cgroups),
        budget=_budget(online, affinity=affinity, cpuset=cpuset, quota=quota),
    )


def read_quota(root: Root, cgroups: Cgroups) -> Quota | None:
    """The tightest CPU bandwidth limit of any ancestor cgroup; None if unlimited.

    Source: cgroup v2 cpu.max ("$QUOTA $PERIOD", microseconds); v1 cpu.cfs_quota_us / cpu.cfs_period_us.
    Raises: ProbeError if a file exists and is malformed.
    """
    quotas = _each_folder(root, cgroups, "cpu", read=lambda version, folder: _quota_of(root, version, folder))
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def read_memory_limit(root: Root, cgroups: Cgroups) -> tuple[int, str] | None:
    """(bytes, file) of the tightest memory limit of any ancestor cgroup; None if unlimited.

    Source: cgroup v2 memory.max, v1 memory.limit_in_bytes. Raises: ProbeError if malformed.
    """
    limits = _each_folder(root, cgroups, "memory", read=lambda version, folder: _memory_of(root, version, folder))
    return min(limits, default=None)


def free_memory(root: Root, cgroups: Cgroups) -> int:
    """Bytes that this process can still allocate without swapping, on the machine and in each of its cgroups.

    Page cache that the kernel would rather drop than kill a process counts as free. Raises: ProbeError if malformed.
    Source: proc(5), MemAvailable; cgroup v2 memory.current, v1 memory.usage_in_bytes, inactive_file of memory.stat.
    """
    machine = _amount(root.text("proc/meminfo"), "MemAvailable:") << 10
    free = _each_folder(root, cgroups, "memory", read=lambda version, folder: _free_of(root, version, folder))
    return max(0, min([machine, *free]))


def _free_of(root: Root, version: int, folder: str) -> int | None:
    limit = _memory_of(root, version, folder)
    used = root.integer(f"{folder}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}")
    if limit is None or used is None:
        return None
    cached = "inactive_file" if version == 2 else "total_inactive_file"
    return limit[0] - used + _amount(root.text(f"{folder}/memory.stat"), cached)


def _amount(text: str | None, name: str) -> int:
    """The number after the name in lines "NAME NUMBER"; 0 if there is none."""
    lines = (line.split() for line in (text or "").splitlines())
    return next((natural(words[1]) or 0 for words in lines if words[:1] == [name] and len(words) > 1), 0)


def _memory_events(root: Root, cgroups: Cgroups) -> str | None:
    """Source: cgroup v2 memory.events; v1 memory.oom_control (Linux >= 4.13 counts there)."""
    for version, folders in cgroups.folders(root, "memory"):
        name = f"{folders[0]}/{'memory.events' if version == 2 else 'memory.oom_control'}"
        if root.exists(name):
            return name
    return None


def _each_folder(root: Root, cgroups: Cgroups, controller: str, *, read: Callable[[int, str], T | None]) -> list[T]:
    found = (read(version, folder) for version, folders in cgroups.folders(root, controller) for folder in folders)
    return [value for value in found if value is not None]


def _quota_of(root: Root, version: int, folder: str) -> Quota | None:
    if version == 1:
        name = f"{folder}/cpu.cfs_quota_us"
        quota, period = root.integer(name), root.integer(f"{folder}/cpu.cfs_period_us")
        if quota is None or quota < 0 or not period:
            return None
        return Quota(cpus=quota / period, source=name)
    name = f"{folder}/cpu.max"
    text = root.text(name)
    if text is None or text.split()[:1] == ["max"]:
        return None
    match [natural(word) for word in text.split()]:
        case [int() as quota, int() as period] if period > 0:
            return Quota(cpus=quota / period, source=name)
    raise root.malformed("CPU quota", text, name)


def _memory_of(root: Root, version: int, folder: str) -> tuple[int, str] | None:
    name = f"{folder}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}"
    if root.text(name) == "max":
        return None
    limit = root.integer(name)
    return None if limit is None or limit >= UNLIMITED_BYTES else (limit, name)


def _tightest_set(root: Root, cgroups: Cgroups, files: dict[int, tuple[str, ...]]) -> Named | None:
    """The set of the nearest cgroup that has one: the kernel keeps it inside its ancestors'."""
    for version, folders in cgroups.folders(root, "cpuset"):
        for folder in folders:
            for name in files[version]:
                ids = root.cpulist(f"{folder}/{name}")
                if ids:
                    return ids, f"{folder}/{name}"
    return None


def _inherited(root: Root, online: frozenset[int]) -> frozenset[int]:
    if root.live and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return _status_ids(root, "Cpus_allowed") or online


def _status_ids(root: Root, key: str) -> frozenset[int] | None:
    """Ids of a line of /proc/self/status, from its list or its mask; None if absent."""
    name = "proc/self/status"
    lines = dict(line.split(":", 1) for line in (root.text(name) or "").splitlines() if ":" in line)
    text = lines.get(f"{key}_list")
    mask = lines.get(key)
    try:
        if text is not None:
            return parse_cpulist(text)
        return None if mask is None else parse_cpumask(mask)
    except ValueError:
        raise root.malformed(f"set of ids ({key})", text or mask, name) from None


def _budget(online: frozenset[int], *, affinity: frozenset[int], cpuset: Named | None, quota: Quota | None) -> Budget:
    cpus = affinity & cpuset[0] & online if cpuset else affinity
    reason = f"all {len(online)} online logical CPUs" if len(online) > 1 else "the only online logical CPU"
    if not cpus:
        cpus = affinity
    if cpus != online:
        reason = f"CPU affinity {format_cpulist(affinity)}"
        if cpuset and cpus == cpuset[0] & online:
            reason = f"cpuset {format_cpulist(cpuset[0])} ({cpuset[1]})"
    threads = len(cpus)
    if quota and quota.threads < threads:
        threads = quota.threads
        reason = f"cgroup CPU quota {round(quota.cpus, 2)} ({quota.source})"
    return Budget(cpus=cpus, threads=threads, limited_by=reason)
