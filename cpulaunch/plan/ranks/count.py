"""The number of ranks on this host."""

from __future__ import annotations

from cpulaunch.plan.gpus.assignment import GPU_WORDS, gpu_count
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.placement.regions import groups
from cpulaunch.plan.ranks.placement import UNITS
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.request import LaunchRequest, setting_source


def rank_count(host: Host, request: LaunchRequest, pool: Pool) -> int:
    """The number of ranks on this host, at least 1. Raises: UsageError if it counts GPUs and there are none."""
    if request.scheduled_rank is not None:
        return request.scheduled_rank.local_world_size
    nproc = request.settings.nproc_per_node
    if isinstance(nproc, int):
        return nproc
    if nproc is None:
        return 1
    if nproc in UNITS:
        return len(groups(pool.cores, UNITS[nproc][1]))
    _check_device(request, nproc)
    return (0 if nproc == "cpu" else gpu_count(host, request)) or _cpu_count(pool)


def _cpu_count(pool: Pool) -> int:
    """The number of CPUs that ranks may run on, SMT siblings included, but at most as many as a quota pays for.

    Source: torch 2.13, torch/_utils.py, cpu_count (which ignores quotas).
    """
    cpus = sum(len(core.allowed) for core in pool.cores)
    return cpus if pool.quota_threads is None else min(cpus, pool.quota_threads)


def _check_device(request: LaunchRequest, nproc: str) -> None:
    if nproc in GPU_WORDS and request.settings.device == "cpu":
        raise UsageError(
            f"--nproc-per-node {nproc} conflicts with --device cpu",
            source=setting_source(request, "nproc_per_node"),
            hint="--nproc-per-node cpu, or drop --device",
        )
