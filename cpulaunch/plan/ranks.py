"""How many ranks this host gets."""

from __future__ import annotations

from cpulaunch.errors import UsageError
from cpulaunch.host import Host
from cpulaunch.plan.pool import Pool
from cpulaunch.plan.rank_placement import UNITS
from cpulaunch.plan.regions import groups
from cpulaunch.request import LaunchRequest, setting_source

GPU_VENDORS = ("nvidia", "amd", "intel")
VENDORS = {"gpu": ("nvidia", "amd"), "xpu": ("intel",)}
"""Whose GPUs a word of --nproc-per-node counts."""


def rank_count(host: Host, request: LaunchRequest, pool: Pool) -> int:
    """How many ranks were asked for on this host. Raises: UsageError if what they are counted by is not there."""
    asked = request.settings.nproc_per_node
    if isinstance(asked, int):
        return asked
    if asked is None:
        return 1
    if asked in UNITS:
        return len(groups(pool.cores, UNITS[asked][1]))
    if asked in VENDORS:
        return _gpu_count(host, request, asked)
    gpus = 0 if asked == "cpu" or request.settings.device == "cpu" else _visible(host, request, GPU_VENDORS)
    return gpus or _cpu_count(pool)


def _cpu_count(pool: Pool) -> int:
    """CPUs that ranks may run on, SMT siblings too, or as many as a quota pays for.

    Source: torch 2.13, torch/_utils.py, cpu_count (which knows no quota).
    """
    cpus = sum(len(core.allowed) for core in pool.cores)
    return cpus if pool.quota_threads is None else min(cpus, pool.quota_threads)


def _gpu_count(host: Host, request: LaunchRequest, asked: str) -> int:
    count = _visible(host, request, VENDORS[asked])
    source = setting_source(request, "nproc_per_node")
    if request.settings.device == "cpu":
        raise UsageError(
            "ranks for GPUs that compute on CPUs",
            value=f"{asked} with --device cpu",
            source=source,
            hint="--nproc-per-node cpu, or drop --device",
        )
    if not count:
        raise UsageError(
            "nproc gpu without GPU" if asked == "gpu" else "nproc xpu without Intel GPU",
            value=f"--nproc-per-node {asked}",
            source=source,
            hint="--nproc-per-node numa starts a rank for each NUMA node; cpulaunch probe shows the GPUs it sees",
        )
    return count


def _visible(host: Host, request: LaunchRequest, vendors: tuple[str, ...]) -> int:
    """GPUs of these makers that CUDA_VISIBLE_DEVICES leaves visible."""
    present = sum(gpu.vendor in vendors for gpu in host.gpus)
    listed = request.environ.get("CUDA_VISIBLE_DEVICES")
    if not present or listed is None or vendors == VENDORS["xpu"]:
        return present
    return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
