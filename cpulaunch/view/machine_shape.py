"""A host as nested groups, as it is drawn: sockets, their NUMA nodes, L3s and cores."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Cache, Host, LogicalCpu, NumaNode, size_text

T = TypeVar("T")
Owners = Mapping[int, int]
"""The worker of each logical CPU that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCore:
    """A core's online logical CPUs. `usable`: this process may use one of them. `owners`: its workers."""

    cpus: tuple[int, ...]
    efficiency: bool
    usable: bool
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class L3Group:
    """The cores that share an L3; `title` is empty where there is none."""

    title: str
    cores: tuple[DrawnCore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """The part of a NUMA node inside one socket; `title` is empty where the machine has no NUMA nodes."""

    title: str
    l3s: tuple[L3Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketGroup:
    """One socket."""

    title: str
    nodes: tuple[NodeGroup, ...]


def machine_shape(host: Host, owners: Owners | None = None) -> tuple[SocketGroup, ...]:
    """The sockets of a host, in the order of their lowest CPU, with everything in them."""
    nodes = {node.id: node for node in host.numa_nodes}
    l3s = {cpu: cache for cache in host.caches if cache.level == 3 for cpu in cache.cpus}

    def l3_of(members: list[LogicalCpu]) -> L3Group:
        cache = None if members[0].l3 is None else l3s.get(members[0].id)
        title = "" if cache is None else _l3_title(cache, members)
        return L3Group(title=title, cores=tuple(_cores(host, members, owners or {})))

    def node_of(members: list[LogicalCpu]) -> NodeGroup:
        node = nodes.get(members[0].numa_node) if members[0].numa_node is not None else None
        title = "" if node is None else node_title(host, node, whole=len(node.cpus) == len(members))
        return NodeGroup(title=title, l3s=tuple(l3_of(part) for part in _split(members, lambda cpu: cpu.l3)))

    sockets = _split(host.cpus, lambda cpu: cpu.socket)
    return tuple(
        SocketGroup(
            title=f"socket {index}",
            nodes=tuple(node_of(part) for part in _split(members, lambda cpu: cpu.numa_node)),
        )
        for index, members in enumerate(sockets)
    )


def node_title(host: Host, node: NumaNode, *, whole: bool = True) -> str:
    """A NUMA node in one line: its id, memory, CPUs and GPUs. Not `whole`: it reaches into other sockets."""
    gpus = [str(gpu.index) for gpu in host.gpus if gpu.numa_node == node.id]
    parts = [f"{'' if whole else 'part of '}NUMA node {node.id}", size_text(node.memory_bytes)]
    if whole:
        parts.append(
            f"CPUs {format_cpulist(node.cpus)}" if node.cpus else "memory only" if node.memory_only else "empty"
        )
    if gpus:
        parts.append("GPU " + ",".join(gpus))
    return " · ".join(part for part in parts if part)


def sibling_step(host: Host) -> int | None:
    """The distance between SMT siblings' ids, if it is the same on every core that has siblings."""
    cores = _split(host.cpus, lambda cpu: cpu.core)
    steps = {b.id - a.id for core in cores for a, b in pairwise(core)}
    return steps.pop() if len(steps) == 1 else None


def _l3_title(cache: Cache, members: list[LogicalCpu]) -> str:
    """The cache's size, and all its CPUs if some of them are drawn in another box."""
    title = f"L3 {size_text(cache.bytes)}".strip()
    return title if len(cache.cpus) == len(members) else f"{title}, shared by CPUs {format_cpulist(cache.cpus)}"


def _split(cpus: Iterable[LogicalCpu], key: Callable[[LogicalCpu], T]) -> list[list[LogicalCpu]]:
    groups: dict[T, list[LogicalCpu]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), []).append(cpu)
    return list(groups.values())


def _cores(host: Host, members: list[LogicalCpu], owners: Owners) -> Iterable[DrawnCore]:
    for siblings in _split(members, lambda cpu: cpu.core):
        ids = tuple(cpu.id for cpu in siblings)
        yield DrawnCore(
            cpus=ids,
            efficiency=siblings[0].kind == "efficiency",
            usable=not host.limits.budget.cpus.isdisjoint(ids),
            owners=tuple(sorted({owners[cpu] for cpu in ids if cpu in owners})),
        )
