"""Machines made of numbers, and requests made of flags, for the planner's tables."""

from types import MappingProxyType
from typing import TypeVar

from cpulaunch.plan.planner import make_plan
from cpulaunch.records.cpulist import format_cpulist, parse_cpulist
from cpulaunch.records.host import (
    Budget,
    CpuInfo,
    Host,
    Kernel,
    Library,
    Limits,
    LogicalCpu,
    NumaNode,
    Quota,
    Torch,
)
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.request import EnvDefault, LaunchRequest, Layer, Program, merge
from cpulaunch.records.settings import setting_specs

GIB = 1 << 30
T = TypeVar("T")
TORCH = Torch(version="2.13.0+cpu", path="/venv/site-packages/torch", plugin=True)
"""A torch that has cpulaunch beside it."""
SCRIPT = Program(kind="script", target="infer.py", interpreter="/venv/bin/python")


def replace(fact: T, **values: object) -> T:
    """The record with other values (dataclasses.replace compiles a class each time, which adds up here)."""
    names = type(fact).__slots__  # type: ignore[attr-defined]
    return type(fact)(**{name: getattr(fact, name) for name in names} | values)


def machine(
    *,
    sockets: int = 1,
    nodes: int = 1,
    l3s: int = 1,
    cores: int = 4,
    smt: int = 1,
    numbering: str = "linux",
    numa: bool = True,
    vendor: str = "GenuineIntel",
    arch: str = "x86_64",
) -> Host:
    """A machine of `sockets` x `nodes` NUMA nodes each x `l3s` L3s each x `cores` each x `smt` siblings.

    Numbering of logical CPUs: linux (all first siblings, then all second ones), adjacent (siblings next to each
    other), interleaved (cores dealt round robin over NUMA nodes).
    """
    places = [
        (s, s * nodes + n, (s * nodes + n) * l3s + g)
        for s in range(sockets)
        for n in range(nodes)
        for g in range(l3s)
        for _ in range(cores)
    ]
    total = len(places)
    order = list(range(total))
    if numbering == "interleaved":
        per_node = l3s * cores
        order = [(k % per_node) * sockets * nodes + k // per_node for k in range(total)]
    first = [order[k] * smt if numbering == "adjacent" else order[k] for k in range(total)]
    step = 1 if numbering == "adjacent" else total
    ids = [[first[k] + t * step for t in range(smt)] for k in range(total)]
    lowest: dict[tuple[str, int], int] = {}
    for k, (socket, _node, l3) in enumerate(places):
        for key in (("socket", socket), ("l3", l3)):
            lowest[key] = min(lowest.get(key, 1 << 30), ids[k][0])
    cpus = sorted(
        (
            LogicalCpu(
                id=id_,
                core=ids[k][0],
                socket=lowest["socket", socket],
                l3=lowest["l3", l3],
                numa_node=node if numa else None,
            )
            for k, (socket, node, l3) in enumerate(places)
            for id_ in ids[k]
        ),
        key=lambda cpu: cpu.id,
    )
    return Host(
        arch=arch,
        cpu=CpuInfo(vendor=vendor),
        cpus=tuple(cpus),
        limits=_limits(frozenset(cpu.id for cpu in cpus)),
        numa_nodes=_nodes(cpus, sockets * nodes) if numa else (),
        memory_bytes=256 * GIB,
    )


def _limits(cpus: frozenset[int]) -> Limits:
    return Limits(affinity=cpus, budget=Budget(cpus=cpus, threads=len(cpus), limited_by="all online CPUs"))


def _nodes(cpus: list[LogicalCpu], count: int) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(
            id=node,
            cpus=frozenset(cpu.id for cpu in cpus if cpu.numa_node == node),
            memory_bytes=64 * GIB,
            distances=tuple((other, 10 if other == node else 20 + abs(node - other)) for other in range(count)),
        )
        for node in range(count)
    )


def offline(host: Host, cpus: str) -> Host:
    """The host with these logical CPUs taken offline."""
    gone = parse_cpulist(cpus)
    kept = tuple(cpu for cpu in host.cpus if cpu.id not in gone)
    return replace(
        host,
        cpus=kept,
        offline_cpus=gone,
        numa_nodes=tuple(replace(node, cpus=node.cpus - gone) for node in host.numa_nodes),
        limits=_limits(frozenset(cpu.id for cpu in kept)),
    )


def cpuset(host: Host, cpus: str, *, mems: str | None = None) -> Host:
    """The host seen from a cgroup whose cpuset is `cpus`."""
    allowed = parse_cpulist(cpus)
    limits = Limits(
        affinity=allowed,
        cpuset=allowed,
        memory_nodes=None if mems is None else parse_cpulist(mems),
        budget=Budget(cpus=allowed, threads=len(allowed), limited_by="cpuset"),
    )
    return replace(host, limits=limits)


def taskset(host: Host, cpus: str) -> Host:
    """The host seen from under `taskset -c CPUS`."""
    allowed = parse_cpulist(cpus)
    budget = Budget(cpus=allowed, threads=len(allowed), limited_by="CPU affinity of this process")
    return replace(host, limits=replace(host.limits, affinity=allowed, budget=budget))


def quota(host: Host, cpus: float) -> Host:
    """The host seen from a cgroup with this CPU quota."""
    limits = host.limits
    budget = replace(limits.budget, threads=max(1, -int(-cpus // 1)), limited_by=f"cgroup CPU quota {cpus}")
    return replace(host, limits=replace(limits, quota=Quota(cpus=cpus, source="cpu.max"), budget=budget))


def hybrid(host: Host, efficiency: str) -> Host:
    """The host with these CPUs as efficiency cores and the others as performance cores."""
    slow = parse_cpulist(efficiency)
    return replace(
        host,
        cpus=tuple(replace(cpu, kind="efficiency" if cpu.id in slow else "performance") for cpu in host.cpus),
    )


def isolated(host: Host, cpus: str) -> Host:
    """The host booted with isolcpus=CPUS."""
    return replace(host, kernel=replace(host.kernel, isolated_cpus=parse_cpulist(cpus)))


def two_sockets_per_node(host: Host) -> Host:
    """The host with its NUMA nodes merged in pairs, so that each spans two sockets."""
    cpus = tuple(replace(cpu, numa_node=(cpu.numa_node or 0) // 2) for cpu in host.cpus)
    return replace(host, cpus=cpus, numa_nodes=_nodes(list(cpus), len(host.numa_nodes) // 2))


def memory(host: Host, node: int, size: int | None, *, free: int | None = None) -> Host:
    """The host with another memory size of a NUMA node; a node that does not exist is added without CPUs."""
    known = {entry.id: entry for entry in host.numa_nodes}
    entry = known.get(node, NumaNode(id=node, cpus=frozenset()))
    known[node] = replace(entry, memory_bytes=size, free_bytes=free)
    return replace(host, numa_nodes=tuple(known[id_] for id_ in sorted(known)))


def libraries(host: Host, *names: str, torch: Torch | None = None) -> Host:
    """The host with these libraries installed under /usr/lib, e.g. "tcmalloc", "intel"."""
    kinds = {"intel": "openmp", "llvm": "openmp", "gnu": "openmp", "mkl-dispatch": "mkl-dispatch"}
    found = tuple(
        Library(kind=kinds.get(name, "allocator"), name=name, path=f"/usr/lib/lib{name}.so")  # type: ignore[arg-type]
        for name in names
    )
    return replace(host, libraries=found, torch=torch)


def kernel(host: Host, **settings: object) -> Host:
    """The host with other kernel settings."""
    return replace(host, kernel=replace(host.kernel or Kernel(), **settings))


def request_of(
    flags: str = "",
    *,
    environ: dict[str, str] | None = None,
    profile: dict[str, object] | None = None,
    profile_env: dict[str, str] | None = None,
    program: Program | None = SCRIPT,
) -> LaunchRequest:
    """The request that the command line makes of these flags; `profile` is a profile named "p"."""
    values: dict[str, object] = {}
    known = setting_specs()
    words = iter(flags.split())
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if name not in known and known[positive].value_type.flag:
            values[positive] = False
            continue
        kind = known[name].value_type
        if kind.flag:
            values[name] = True
        elif kind.repeatable:
            values[name] = (*values.get(name, ()), *kind.from_text(next(words)))  # type: ignore[misc]
        else:
            values[name] = kind.from_text(next(words))
    layers = [Layer(origin="cli", values=values)]
    if profile is not None or profile_env is not None:
        env = tuple(EnvDefault(name=k, value=v, reason="p says so") for k, v in (profile_env or {}).items())
        layers.append(Layer(origin="profile:p", values=MappingProxyType(profile or {}), env=env))
    return merge(layers, program=program, profile="p" if len(layers) > 1 else None, environ=environ or {})


def plan(host: Host, flags: str = "", **more: object) -> LaunchPlan:
    """The plan of these flags on a host, nothing tried."""
    return make_plan(host, request_of(flags, **more))  # type: ignore[arg-type]


def lines(made: LaunchPlan) -> list[str]:
    """One line per worker: index, CPUs, memory policy with NUMA nodes, threads, DataLoader CPUs if it has any."""
    return [
        f"{w.index}: {format_cpulist(w.cpus)} {w.mempolicy}:{format_cpulist(w.numa_nodes)} t{w.threads}"
        + (f" l{format_cpulist(w.loader_cpus)}" if w.loader_cpus else "")
        for w in made.workers
    ]
