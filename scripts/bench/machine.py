"""Facts that a published number must state: the machine, its load, and the versions of the software."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

PACKAGES = ("cpulaunch", "torch", "transformers", "intel-openmp")
PEER_PACKAGES = (
    *("torch", "intel_extension_for_pytorch", "zentorch", "transformers", "intel-openmp", "timm"),
    *("llama_cpp_python", "gguf"),
)
ENVIRONMENT_KEYS = (
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
)


def describe_machine() -> dict[str, object]:
    """Processor, usable CPUs, memory in bytes, kernel, huge pages, load average and set variables, as JSON data."""
    return {
        "processor": _processor_name(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "transparent_hugepage": _selected(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": list(os.getloadavg()),
        "inherited_environment": {key: os.environ[key] for key in ENVIRONMENT_KEYS if key in os.environ},
    }


def describe_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Package -> version, for Python and those of `packages` that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_environments(folder: Path, names: Iterable[str | None]) -> dict[str, dict[str, str]]:
    """Environment created by setup-peers -> package -> version, for each environment in `names`."""
    described = {}
    for name in sorted(name for name in names if name):
        site_packages = [str(path) for path in (folder / name).glob("lib/python*/site-packages")]
        found = {item.name: item.version for item in metadata.distributions(path=site_packages)}
        described[name] = {package: found[package] for package in PEER_PACKAGES if package in found}
    return described


def free_cores() -> list[int]:
    """Usable logical CPUs, one for each core, in ascending order.

    Source: /sys/devices/system/cpu/cpuN/topology/thread_siblings_list.
    """
    usable = sorted(os.sched_getaffinity(0))
    first_by_siblings: dict[str, int] = {}
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        first_by_siblings.setdefault(core, cpu)
    return sorted(first_by_siblings.values())


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    pairs = [line.partition(":") for line in lines]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    ids = [f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields]
    return f"{name} ({', '.join(ids)})" if ids else name


def _selected(setting: Path) -> str | None:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    if not setting.exists():
        return None
    return next((word.strip("[]") for word in setting.read_text().split() if word.startswith("[")), None)
