"""A machine as `cpulaunch probe` prints it: as JSON, and as text for a person."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import FEATURES, Gpu, Host, Library, Limits, count_text, size_text
from cpulaunch.view.calibration_view import calibration_lines, figures_json
from cpulaunch.view.machine_map import machine_map
from cpulaunch.view.text import painter, wrapped

SCHEMA = 1
LABEL_COLUMNS = 11
FEW_NODES = 8
"""Up to this many NUMA nodes the whole table of distances is printed."""


def probe_json(host: Host) -> dict[str, Any]:
    """The host as JSON-ready data, schema 1; sets of ids are lists such as "0-3,8"."""
    return {
        "schema": SCHEMA,
        "arch": host.arch,
        "sysroot": host.sysroot,
        "container": host.container,
        "memory_bytes": host.memory_bytes,
        "cpu": {
            "vendor": host.cpu.vendor,
            "model_name": host.cpu.model_name,
            "family": host.cpu.family,
            "model": host.cpu.model,
            "platform": host.cpu.platform,
            "current_mhz": host.cpu.current_mhz,
            "max_mhz": host.cpu.max_mhz,
            "isa": [name for name in FEATURES if name in host.cpu.isa],
            "features": {name: name in host.cpu.isa for name in FEATURES},
        },
        "cpus": [asdict(cpu) for cpu in host.cpus],
        "offline_cpus": format_cpulist(host.offline_cpus),
        "numa_nodes": [_node_json(host, index) for index in range(len(host.numa_nodes))],
        "caches": [asdict(cache) | {"cpus": format_cpulist(cache.cpus)} for cache in host.caches],
        "limits": _limits_json(host.limits),
        "kernel": asdict(host.kernel) | {"isolated_cpus": format_cpulist(host.kernel.isolated_cpus)},
        "libraries": [asdict(library) for library in host.libraries],
        "torch": None if host.torch is None else asdict(host.torch),
        "calibration": None if host.calibration is None else figures_json(host.calibration),
        "gpus": [asdict(gpu) | {"cpus": format_cpulist(gpu.cpus)} for gpu in host.gpus],
    }


def _node_json(host: Host, index: int) -> dict[str, Any]:
    node = host.numa_nodes[index]
    return {
        "id": node.id,
        "cpus": format_cpulist(node.cpus),
        "memory_bytes": node.memory_bytes,
        "free_bytes": node.free_bytes,
        "distances": {str(other): distance for other, distance in node.distances},
        "memory_only": node.memory_only,
        "initiators": format_cpulist(node.initiators),
    }


def _limits_json(limits: Limits) -> dict[str, Any]:
    return {
        "affinity": format_cpulist(limits.affinity),
        "cpuset": _optional_list(limits.cpuset),
        "memory_nodes": _optional_list(limits.memory_nodes),
        "quota_cpus": None if limits.quota is None else limits.quota.cpus,
        "quota_source": None if limits.quota is None else limits.quota.source,
        "memory_bytes": limits.memory_bytes,
        "memory_source": limits.memory_source,
        "budget": {
            "cpus": format_cpulist(limits.budget.cpus),
            "threads": limits.budget.threads,
            "limited_by": limits.budget.limited_by,
        },
    }


def _optional_list(ids: frozenset[int] | None) -> str | None:
    return None if ids is None else format_cpulist(ids)


def probe_text(host: Host, *, width: int, color: bool) -> str:
    """The host for a person: a table, an empty line, the map. At most `width` columns unless a path is longer."""
    rows = (
        ("cpu", _cpu(host)),
        ("cores", _cores(host)),
        ("caches", _caches(host)),
        ("memory", _memory(host)),
        ("features", [" ".join(name for name in FEATURES if name in host.cpu.isa) or "none that torch uses"]),
        ("limits", _limits(host)),
        ("budget", [_budget(host)]),
        ("kernel", _kernel(host)),
    )
    lines = [line for label, parts in rows for line in _row(label, parts, width=width, color=color)]
    lines += _listed("libraries", [_library(library) for library in host.libraries], color=color)
    lines += _listed("torch", list(_torch(host)), color=color)
    if host.calibration is not None:
        lines += _listed("measured", [*calibration_lines(host.calibration)], color=color)
    lines += _listed("GPUs", [_gpu(gpu) for gpu in host.gpus], color=color)
    lines += _listed("distances", list(_distances(host)), color=color) if len(host.numa_nodes) > 1 else []
    return "\n".join([*lines, "", machine_map(host, width=width, color=color)])


def _row(label: str, parts: Iterable[str], *, width: int, color: bool) -> list[str]:
    """A labelled row; the parts are joined by dots and wrapped between parts, or words where one is too long."""
    glued = [part.replace(" ", "\0") if len(part) < width - LABEL_COLUMNS else part for part in parts if part]
    text = " · ".join(glued) or "unknown"
    lines = wrapped(text, width - LABEL_COLUMNS)
    return _listed(label, [line.replace("\0", " ").removesuffix(" ·") for line in lines], color=color)


def _listed(label: str, lines: list[str], *, color: bool) -> list[str]:
    """A labelled row of lines; "none" if there are no lines."""
    first = label.ljust(LABEL_COLUMNS)
    heads = [painter("bold", color=color)(first), *([" " * LABEL_COLUMNS] * len(lines))]
    return [head + escaped(line) for head, line in zip(heads, lines or ["none"], strict=False)]


def _cpu(host: Host) -> list[str]:
    cpu = host.cpu
    model = None if cpu.model is None else f"model {cpu.model}" if cpu.family is not None else f"part {cpu.model:#x}"
    numbers = [cpu.vendor, None if cpu.family is None else f"family {cpu.family}", model]
    return [
        cpu.model_name or "unknown model",
        host.arch,
        " ".join(number for number in numbers if number),
        _frequency(cpu.current_mhz, cpu.max_mhz),
        cpu.platform or "",
    ]


def _frequency(current_mhz: float | None, max_mhz: float | None) -> str:
    """Frequencies in GHz: "2.6 GHz", "2.6 GHz, at most 4.1 GHz"; empty if unknown."""
    current = "" if current_mhz is None else f"{current_mhz / 1000:.1f} GHz"
    highest = "" if max_mhz is None else f"at most {max_mhz / 1000:.1f} GHz"
    return ", ".join(part for part in (current, highest) if part)


def _cores(host: Host) -> list[str]:
    cores = {cpu.core for cpu in host.cpus}
    sockets = len({cpu.socket for cpu in host.cpus})
    efficient = len({cpu.core for cpu in host.cpus if cpu.kind == "efficiency"})
    return [
        count_text(sockets, "socket"),
        count_text(len(host.numa_nodes), "NUMA node") if host.numa_nodes else "no NUMA nodes",
        count_text(len(cores), "core") + (f" ({efficient} efficiency cores)" if efficient else ""),
        count_text(len(host.cpus), "logical CPU"),
        f"offline {format_cpulist(host.offline_cpus)}" if host.offline_cpus else "",
    ]


def _caches(host: Host) -> Iterator[str]:
    counts: dict[tuple[int, str, int | None], int] = {}
    for cache in host.caches:
        suffix = {"Data": "d", "Instruction": "i"}.get(cache.type, "")
        key = cache.level, suffix, cache.bytes
        counts[key] = counts.get(key, 0) + 1
    for (level, suffix, size), number in counts.items():
        yield f"L{level}{suffix} {number} × {size_text(size) or 'unknown size'}"


def _memory(host: Host) -> list[str]:
    only = [node.id for node in host.numa_nodes if node.memory_only]
    return [
        size_text(host.memory_bytes) or "unknown",
        f"memory-only NUMA nodes {format_cpulist(only)}" if only else "",
    ]


def _limits(host: Host) -> list[str]:
    limits = host.limits
    return [
        f"affinity {format_cpulist(limits.affinity)}",
        "no cpuset" if limits.cpuset is None else f"cpuset {format_cpulist(limits.cpuset)}",
        "no CPU quota" if limits.quota is None else f"CPU quota {limits.quota.cpus:g}",
        "no memory limit" if limits.memory_bytes is None else f"memory limit {size_text(limits.memory_bytes)}",
        "in a container" if host.container else "",
    ]


def _budget(host: Host) -> str:
    budget = host.limits.budget
    return f"{count_text(budget.threads, 'thread')} on CPUs {format_cpulist(budget.cpus)}: {budget.limited_by}"


def _kernel(host: Host) -> list[str]:
    kernel = host.kernel
    balancing = {True: "on", False: "off", None: "unknown"}[kernel.numa_balancing]
    return [
        f"Linux {kernel.release}" if kernel.release else "",
        f"huge pages {kernel.transparent_hugepage or 'unknown'}",
        f"NUMA balancing {balancing}",
        f"governor {kernel.governor}" if kernel.governor else "no governor",
        f"SMT {kernel.smt.replace('not', 'not ')}" if kernel.smt else "",
        f"isolated CPUs {format_cpulist(kernel.isolated_cpus)}" if kernel.isolated_cpus else "",
        f"memory policy {kernel.mempolicy}",
    ]


def _gpu(gpu: Gpu) -> str:
    """A GPU: vendor, model, place, MIG devices or tiles, and whether this process may open it."""
    parts = f"{gpu.index} {gpu.vendor} {gpu.model or ''}".rstrip() + f" {gpu.pci}{_near(gpu.numa_node)}"
    if gpu.mig:
        parts += f", {count_text(len(gpu.mig), 'MIG device')}"
    if gpu.tiles > 1:
        parts += f", {gpu.tiles} tiles"
    return parts if gpu.accessible else f"{parts}, not accessible to this process"


def _library(library: Library) -> str:
    reason = f" (not used: {library.untrusted})" if library.untrusted else ""
    return f"{library.name:13}{library.path}{reason}"


def _torch(host: Host) -> Iterator[str]:
    if host.torch is None:
        return
    yield f"{host.torch.version:12} {host.torch.path}"
    if host.torch.bundled_openmp:
        yield f"OpenMP       {host.torch.bundled_openmp}"
    plugin = "cpulaunch (loaded by torch)" if host.torch.plugin else "none, so settings inside torch have no effect"
    yield f"plugin       {plugin}"
    yield from (f"extension    {name}" for name in host.torch.extensions)


def _near(node: int | None) -> str:
    return "" if node is None else f" on NUMA node {node}"


def _distances(host: Host) -> Iterator[str]:
    if len(host.numa_nodes) > FEW_NODES:
        values = sorted({distance for node in host.numa_nodes for _, distance in node.distances})
        yield f"between NUMA nodes: {', '.join(map(str, values)) or 'unknown'}"
        return
    for node in (node for node in host.numa_nodes if node.distances):
        yield f"{node.id}: " + " ".join(f"{distance:3}" for _, distance in node.distances)
