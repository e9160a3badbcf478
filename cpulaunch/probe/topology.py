"""Logical CPUs and the groups they form: cores, sockets, dies, L3s, kinds.

One file is read per group, not per CPU: a group's file names all its members.
Source: kernel, Documentation/admin-guide/cputopology.rst, Documentation/ABI/stable/sysfs-devices-system-cpu.
"""

from __future__ import annotations

from cpulaunch.records.host import CoreKind, LogicalCpu, NumaNode
from cpulaunch.records.record import record
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CPU = "sys/devices/system/cpu"
Grouping = dict[int, int]
"""A CPU's group by CPU; a group's id is its lowest member, offline ones included."""

PACKAGE_FILES = ("core_siblings", "package_cpus")
CORE_FILES = ("thread_siblings", "core_cpus")

MAX_HYBRID_CPUS = 128
"""Hybrid Arm machines are small; capacities of a large server's CPUs are not worth a read each."""

EFFICIENCY_SHARE = 0.5
"""Arm CPUs below this share of the largest cpu_capacity count as efficiency cores (little cores have a third)."""


@record(kw_only=False)
class CpuIds:
    """Which logical CPUs there are and which of them are online."""

    present: frozenset[int]
    online: frozenset[int]

    @property
    def offline(self) -> frozenset[int]:
        """CPUs that are there and switched off."""
        return self.present - self.online


class Groups:
    """Groups being collected: `of` each CPU. `conflict`: two files disagreed about a CPU."""

    def __init__(self) -> None:
        self.of: Grouping = {}
        self.conflict = False

    def add(self, cpu: int, members: frozenset[int], ids: CpuIds) -> frozenset[int]:
        """The group's own online CPUs, once those of earlier groups are taken away."""
        if not self.of.keys().isdisjoint(members):
            self.conflict = True
        own = [member for member in members if member in ids.present and member not in self.of] + [cpu]
        self.of.update(dict.fromkeys(own, min(own)))
        return ids.online.intersection(own)


def read_cpu_ids(root: Root) -> CpuIds:
    """The machine's logical CPUs, from sysfs or, where it says nothing, from /proc. Never empty."""
    directories = frozenset(_numbered(root.names(CPU), "cpu"))
    online = root.cpulist(f"{CPU}/online") or _switched_on(root, directories)
    if not online:
        online = _cpus_of_stat(root) or _cpus_of_cpuinfo(root) or frozenset({0})
    present = root.cpulist(f"{CPU}/present") or directories
    return CpuIds(present=present | online, online=online)


def read_cpus(root: Root, ids: CpuIds, *, nodes: tuple[NumaNode, ...], l3: Grouping) -> tuple[LogicalCpu, ...]:
    """Every online logical CPU with its groups, by id."""
    cores = group(ids, lambda cpu: _members(root, cpu, CORE_FILES)).of
    sockets = _sockets(root, ids)
    dies = group(ids, lambda cpu: _die(root, cpu)).of if _has_dies(root, ids) else {}
    kinds = _kinds(root, ids)
    node_of = _node_of(nodes)
    return tuple(
        LogicalCpu(
            id=cpu,
            core=cores[cpu],
            socket=sockets[cpu],
            die=dies.get(cpu),
            l3=l3.get(cpu),
            numa_node=node_of.get(cpu),
            kind=kinds.get(cpu),
        )
        for cpu in sorted(ids.online)
    )


def group(ids: CpuIds, members: Callable[[int], frozenset[int] | None]) -> Groups:
    """Groups of the online CPUs; a CPU whose file is absent is a group of its own."""
    groups = Groups()
    for cpu in sorted(ids.online):
        if cpu not in groups.of:
            groups.add(cpu, members(cpu) or frozenset({cpu}), ids)
    return groups


def core_members(root: Root, cpu: int) -> frozenset[int] | None:
    """The CPU and its SMT siblings; None where the machine does not say."""
    return _members(root, cpu, CORE_FILES)


def _numbered(names: list[str], prefix: str) -> list[int]:
    size = len(prefix)
    numbers = (natural(name[size:]) for name in names if name.startswith(prefix))
    return [number for number in numbers if number is not None]


def _switched_on(root: Root, directories: frozenset[int]) -> frozenset[int]:
    return frozenset(cpu for cpu in directories if root.text(f"{CPU}/cpu{cpu}/online") != "0")


def _cpus_of_stat(root: Root) -> frozenset[int]:
    lines = (root.text("proc/stat") or "").splitlines()
    return frozenset(_numbered([line.split(" ", 1)[0] for line in lines], "cpu"))


def _cpus_of_cpuinfo(root: Root) -> frozenset[int]:
    pairs = (line.partition(":") for line in (root.text("proc/cpuinfo") or "").splitlines())
    numbers = (natural(value.strip()) for key, _, value in pairs if key.strip() == "processor")
    return frozenset(number for number in numbers if number is not None)


def _members(root: Root, cpu: int, files: tuple[str, ...]) -> frozenset[int] | None:
    for name in files:
        members = root.ids(f"{CPU}/cpu{cpu}/topology/{name}")
        if members is not None:
            return members
    return None


def _sockets(root: Root, ids: CpuIds) -> Grouping:
    """Sockets by core_siblings; where these contradict one another, by physical_package_id if that is known.

    physical_package_id alone is not enough: it may be -1 or repeated.
    """
    if _members(root, min(ids.online), PACKAGE_FILES) is None:
        return dict.fromkeys(ids.present, min(ids.present))
    groups = group(ids, lambda cpu: _members(root, cpu, PACKAGE_FILES))
    if groups.conflict:
        packages = {cpu: root.integer(f"{CPU}/cpu{cpu}/topology/physical_package_id") for cpu in sorted(ids.online)}
        if all(package is not None and package >= 0 for package in packages.values()):
            lowest = {package: cpu for cpu, package in reversed(packages.items())}
            return {cpu: lowest[package] for cpu, package in packages.items()}
    return groups.of


def _has_dies(root: Root, ids: CpuIds) -> bool:
    die = root.integer(f"{CPU}/cpu{min(ids.online)}/topology/die_id")
    return die is not None and die >= 0


def _die(root: Root, cpu: int) -> frozenset[int] | None:
    return _members(root, cpu, ("die_cpus",))


def _kinds(root: Root, ids: CpuIds) -> dict[int, CoreKind]:
    """Performance and efficiency CPUs; empty where all are alike. Never judged by clock rates.

    Source: /sys/devices/cpu_core, cpu_atom, cpu_lowpower (Intel); cpu_capacity (Arm, Documentation/devicetree).
    """
    fast = root.cpulist("sys/devices/cpu_core/cpus")
    slow = root.cpulist("sys/devices/cpu_atom/cpus") or frozenset()
    if fast and slow:
        slow |= root.cpulist("sys/devices/cpu_lowpower/cpus") or frozenset()
        return {cpu: "efficiency" if cpu in slow else "performance" for cpu in ids.online}
    if len(ids.online) > MAX_HYBRID_CPUS or not root.exists(f"{CPU}/cpu{min(ids.online)}/cpu_capacity"):
        return {}
    capacity = {cpu: root.integer(f"{CPU}/cpu{cpu}/cpu_capacity") or 0 for cpu in ids.online}
    limit = max(capacity.values()) * EFFICIENCY_SHARE
    if min(capacity.values()) >= limit:
        return {}
    return {cpu: "efficiency" if value < limit else "performance" for cpu, value in capacity.items()}


def _node_of(nodes: tuple[NumaNode, ...]) -> Grouping:
    """The NUMA node of each CPU; where cpumaps overlap, the smallest node, then the lowest id."""
    node_of: Grouping = {}
    for node in sorted(nodes, key=lambda node: (len(node.cpus), node.id)):
        for cpu in node.cpus:
            node_of.setdefault(cpu, node.id)
    return node_of
