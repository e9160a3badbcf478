"""Machines without /sys and /proc (macOS, Windows): what psutil and py-cpuinfo say.

Both are imported here only: they cost 20 ms and 1 s.
"""

import os
import platform

from cpulaunch.records.host import FEATURES, Budget, CpuInfo, Host, Kernel, Limits, LogicalCpu


def probe_portable() -> Host:
    """The host with its cores numbered as psutil counts them: one socket, no caches, no NUMA nodes."""
    import psutil

    logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    threads = max(1, logical // physical)
    online = frozenset(range(logical))
    cpus = tuple(LogicalCpu(id=cpu, core=cpu - cpu % threads, socket=0) for cpu in sorted(online))
    affinity = _affinity(online)
    reason = "all online logical CPUs" if affinity == online else "inherited affinity"
    budget = Budget(cpus=affinity, threads=len(affinity), limited_by=reason)
    return Host(
        arch=platform.machine(),
        cpu=_cpu_info(),
        cpus=cpus,
        limits=Limits(affinity=affinity, budget=budget),
        kernel=Kernel(release=platform.release()),
        memory_bytes=psutil.virtual_memory().total,
        can_bind=hasattr(os, "sched_setaffinity"),
    )


def _affinity(online: frozenset[int]) -> frozenset[int]:
    import psutil

    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        return online
    return frozenset(process.cpu_affinity()) & online or online


def _cpu_info() -> CpuInfo:
    import cpuinfo

    facts = cpuinfo.get_cpu_info()
    return CpuInfo(
        vendor=facts.get("vendor_id_raw"),
        model_name=facts.get("brand_raw"),
        family=facts.get("family"),
        model=facts.get("model"),
        isa=frozenset(FEATURES) & frozenset(facts.get("flags", ())),
    )
