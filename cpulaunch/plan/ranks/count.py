"""How many ranks this host gets."""

from __future__ import annotations

from cpulaunch.plan.gpus.assignment import INSIST, gpu_count
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.placement.regions import groups
from cpulaunch.plan.ranks.placement import UNITS
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.request import LaunchRequest, setting_source


def rank_count(host: Host, request: LaunchRequest, pool: Pool) -> int:
    """How many ranks were asked for on this host. Raises: UsageError if what they are counted by is not there."""
    if request.scheduled_rank is not None:
        return request.scheduled_rank.local_world_size
    asked = request.settings.nproc_per_node
    if isinstance(asked, int):
        return asked
    if asked is None:
        return 1
    if asked in UNITS:
        return len(groups(pool.cores, UNITS[asked][1]))
    _check_device(request, asked)
    return (0 if asked == "cpu" else gpu_count(host, request)) or _cpu_count(pool)


def _cpu_count(pool: Pool) -> int:
    """CPUs that ranks may run on, SMT siblings too, or as many as a quota pays for.

    Source: torch 2.13, torch/_utils.py, cpu_count (which knows no quota).
    """
    cpus = sum(len(core.allowed) for core in pool.cores)
    return cpus if pool.quota_threads is None else min(cpus, pool.quota_threads)


def _check_device(request: LaunchRequest, asked: str) -> None:
    if asked in INSIST and request.settings.device == "cpu":
        raise UsageError(
            "ranks for GPUs that compute on CPUs",
            value=f"{asked} with --device cpu",
            source=setting_source(request, "nproc_per_node"),
            hint="--nproc-per-node cpu, or drop --device",
        )
