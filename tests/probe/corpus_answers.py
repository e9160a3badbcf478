"""Facts of a probed Host under the names that the captured machines' expected facts use."""

from collections.abc import Callable, Iterable
from typing import Any

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Cache, Host, LogicalCpu

CACHE_SUFFIX = {"Data": "d", "Instruction": "i", "Unified": ""}


def answers(host: Host) -> dict[str, Any]:
    """Name -> value of every fact that the host has."""
    found = _cpus(host) | _nodes(host) | _caches(host)
    if host.cpu.model_name is not None:
        found["model_name"] = host.cpu.model_name
    if host.memory_bytes is not None:
        found["machine_memory"] = host.memory_bytes
    return found


def _cpus(host: Host) -> dict[str, Any]:
    cores = _groups(host.cpus, lambda cpu: cpu.core)
    sockets = _groups(host.cpus, lambda cpu: cpu.socket)
    found: dict[str, Any] = {
        "online_cpus": format_cpulist(cpu.id for cpu in host.cpus),
        "n_online": len(host.cpus),
        "offline_cpus": format_cpulist(host.offline_cpus),
        "n_cores": len(cores),
        "cores": cores,
        "n_sockets": len(sockets),
        "sockets": sockets,
        "threads_per_core": {
            "min": min(_sizes(host.cpus)),
            "max": max(_sizes(host.cpus)),
        },
    }
    if host.cpus[0].die is not None:
        found["dies"] = _groups(host.cpus, lambda cpu: cpu.die)
        found["n_dies"] = len(found["dies"])
    kinds = [cpu.kind for cpu in host.cpus]
    if "efficiency" in kinds:
        found["cpu_kinds"] = [
            format_cpulist(cpu.id for cpu in host.cpus if cpu.kind == kind) for kind in ("efficiency", "performance")
        ]
    return found


def _sizes(cpus: Iterable[LogicalCpu]) -> list[int]:
    cores = [cpu.core for cpu in cpus]
    return [cores.count(core) for core in set(cores)]


def _groups(cpus: Iterable[LogicalCpu], key: Callable[[LogicalCpu], int | None]) -> list[str]:
    members: dict[int | None, list[int]] = {}
    for cpu in cpus:
        members.setdefault(key(cpu), []).append(cpu.id)
    return [format_cpulist(ids) for ids in members.values()]


def _nodes(host: Host) -> dict[str, Any]:
    if not host.numa_nodes:
        return {}
    nodes = host.numa_nodes
    cpus_of = {node.id: node.cpus for node in nodes}
    near = {
        str(node.id): format_cpulist(cpu for other in node.initiators for cpu in cpus_of[other])
        for node in nodes
        if node.initiators
    }
    return {
        **({"memory_locality": near} if near else {}),
        "n_numa_nodes": len(nodes),
        "numa_nodes": {str(node.id): format_cpulist(node.cpus) for node in nodes},
        "cpuless_nodes": [node.id for node in nodes if not node.cpus],
        "memory_only_nodes": [node.id for node in nodes if node.memory_only],
        "numa_memory": {str(node.id): node.memory_bytes for node in nodes if node.memory_bytes is not None},
        "numa_distance": {
            str(node.id): {str(other): distance for other, distance in node.distances}
            for node in nodes
            if node.distances
        },
    }


def _caches(host: Host) -> dict[str, Any]:
    found: dict[str, list[Cache]] = {}
    for cache in host.caches:
        found.setdefault(f"L{cache.level}{CACHE_SUFFIX[cache.type]}", []).append(cache)
    return {
        name: {
            "count": len(caches),
            "instances": [{"cpus": format_cpulist(cache.cpus), "bytes": cache.bytes} for cache in caches],
        }
        for name, caches in found.items()
    }
