"""Facts from psutil and py-cpuinfo: hosts without /sys and /proc (macOS, Windows), and on Linux frequencies and CPUID.

Importing psutil takes 20 ms and asking py-cpuinfo takes 1 s, so no launch on Linux does either.
"""

import os
import platform
from typing import Any

from cpulaunch.probe.isa import features_of
from cpulaunch.records.host import Budget, CpuInfo, Host, Kernel, Limits, LogicalCpu

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps Python from looking for modules in the current folder. Source: Python 3.11, -P."""


def probe_portable() -> Host:
    """The host with its cores numbered as psutil counts them: one socket, no caches, no NUMA nodes."""
    import psutil

    logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    threads = max(1, logical // physical)
    online = frozenset(range(logical))
    cpus = tuple(LogicalCpu(id=cpu, core=cpu - cpu % threads, socket=0) for cpu in sorted(online))
    affinity = _affinity(online)
    reason = "all online logical CPUs" if affinity == online else "CPU affinity"
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


def _cpuid_facts() -> dict[str, Any]:
    """What py-cpuinfo finds. Effect: its processes import nothing from the current folder.

    Where multiprocessing does not fork, Python is started for them with a program as text (`-c`).
    """
    import cpuinfo

    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        facts: dict[str, Any] = cpuinfo.get_cpu_info()
        return facts
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _cpu_info() -> CpuInfo:
    facts = _cpuid_facts()
    current, maximum = read_frequencies()
    return CpuInfo(
        vendor=facts.get("vendor_id_raw"),
        model_name=facts.get("brand_raw"),
        family=facts.get("family"),
        model=facts.get("model"),
        isa=features_of(facts.get("flags", ())),
        current_mhz=current,
        max_mhz=maximum,
    )


def read_frequencies() -> tuple[float | None, float | None]:
    """Current frequency, as the mean of all CPUs, and highest frequency, in MHz; None where it is unknown."""
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError):
        return None, None
    return (None, None) if frequency is None else (frequency.current or None, frequency.max or None)


def read_cpuid_features() -> frozenset[str]:
    """The FEATURES that py-cpuinfo finds, which asks the processor by CPUID beside the files of the kernel.

    Effect: py-cpuinfo runs machine code in a process of its own, and lscpu where it is installed; about 1 s.
    """
    return features_of(_cpuid_facts().get("flags", ()))
