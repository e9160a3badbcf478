"""Logical CPUs, the groups they form (cores, dies, sockets), and their kinds.

One file is read per group, not per CPU: a group's file names all its members. docs/architecture.md has the rules for
files that contradict one another.
Source: kernel, Documentation/admin-guide/cputopology.rst, Documentation/ABI/stable/sysfs-devices-system-cpu.
"""

from __future__ import annotations

from cpulaunch.records.cpulist import MAX_ID
from cpulaunch.records.host import CoreKind, CpuInfo, LogicalCpu, NumaNode
from cpulaunch.records.record import record
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CPU = "sys/devices/system/cpu"
Grouping = dict[int, int]
"""A CPU's group by CPU; a group's id is its lowest member, offline ones included."""
Kinds = dict[int, CoreKind]
Package = tuple[int | None, int | None, int]
"""The ids of a package's drawer and book (s390; else None), and its own."""

PACKAGE_FILES = ("core_siblings", "package_cpus")
DIE_FILES = ("die_cpus",)
CORE_FILES = ("thread_siblings", "core_cpus")
"""The older name first: it is there in every kernel. Of each, the list counts before the mask."""

MAX_HYBRID_CPUS = 128
"""Hybrid Arm machines are small; capacities of a large server's CPUs are not worth a read each."""

EFFICIENCY_SHARE = 0.5
"""Arm CPUs below this share of the largest cpu_capacity count as efficiency cores (little cores have a third)."""

LAKEFIELD = ("GenuineIntel", 6, 0x8A)
"""The only hybrid x86 processor of before Linux 5.13, which added cpu_core and cpu_atom."""


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


def read_cpus(
    root: Root, ids: CpuIds, *, nodes: tuple[NumaNode, ...], l3: Grouping, kinds: Kinds
) -> tuple[LogicalCpu, ...]:
    """Every online logical CPU with its groups, by id. A core is inside one die, and a die inside one socket."""
    sockets = _sockets(root, ids)
    dies = _dies(root, ids, sockets)
    cores = _inside(dies or sockets, group(ids, lambda cpu: _members(root, cpu, CORE_FILES)).of, ids)
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
    return [number for number in numbers if number is not None and number <= MAX_ID]


def _switched_on(root: Root, directories: frozenset[int]) -> frozenset[int]:
    return frozenset(cpu for cpu in directories if root.text(f"{CPU}/cpu{cpu}/online") != "0")


def _cpus_of_stat(root: Root) -> frozenset[int]:
    lines = (root.text("proc/stat") or "").splitlines()
    return frozenset(_numbered([line.split(" ", 1)[0] for line in lines], "cpu"))


def _cpus_of_cpuinfo(root: Root) -> frozenset[int]:
    pairs = (line.partition(":") for line in (root.text("proc/cpuinfo") or "").splitlines())
    numbers = (natural(value.strip()) for key, _, value in pairs if key.strip() == "processor")
    return frozenset(number for number in numbers if number is not None and number <= MAX_ID)


def _members(root: Root, cpu: int, files: tuple[str, ...]) -> frozenset[int] | None:
    for name in files:
        members = root.ids(f"{CPU}/cpu{cpu}/topology/{name}")
        if members is not None:
            return members
    return None


def _sockets(root: Root, ids: CpuIds) -> Grouping:
    """The sockets: the CPUs of one package id, or where a CPU has none, those of one sibling list.

    Old kernels end sibling lists at a NUMA node (Cluster-on-Die). Ids are read of the first and last CPU of each list,
    and of all CPUs where lists contradict these or one another.
    """
    if _members(root, min(ids.online), PACKAGE_FILES) is None:
        return _by_package(root, ids) or dict.fromkeys(ids.present, min(ids.present))
    groups = group(ids, lambda cpu: _members(root, cpu, PACKAGE_FILES))
    members: dict[int, list[int]] = {}
    for cpu in sorted(ids.online):
        members.setdefault(groups.of[cpu], []).append(cpu)
    packages = {low: package_of(root, cpus[0]) for low, cpus in members.items()}
    ends = ((cpus[-1], packages[low]) for low, cpus in members.items() if len(cpus) > 1)
    if groups.conflict or any(package_of(root, last) != package for last, package in ends):
        return _by_package(root, ids) or groups.of
    if None in packages.values():
        return groups.of
    lowest: dict[Package | None, int] = {}
    for low, package in sorted(packages.items()):
        lowest.setdefault(package, low)
    return {cpu: lowest[packages[groups.of[cpu]]] for cpu in ids.online}


def _by_package(root: Root, ids: CpuIds) -> Grouping | None:
    """Groups of the online CPUs by package id; None if a CPU has none."""
    packages = {cpu: package_of(root, cpu) for cpu in sorted(ids.online)}
    if None in packages.values():
        return None
    lowest = {package: cpu for cpu, package in reversed(packages.items())}
    return {cpu: lowest[package] for cpu, package in packages.items()}


def package_of(root: Root, cpu: int) -> Package | None:
    """The CPU's package id, on s390 with the ids of its drawer and book; None if it is absent or -1 (unknown)."""
    base = f"{CPU}/cpu{cpu}/topology"
    package = root.integer(f"{base}/physical_package_id")
    if package is None or package < 0:
        return None
    return (root.integer(f"{base}/drawer_id"), root.integer(f"{base}/book_id"), package)


def _dies(root: Root, ids: CpuIds, sockets: Grouping) -> Grouping:
    """The dies: the CPUs of one die list inside one socket; empty where the kernel knows no dies (die_id -1)."""
    die = root.integer(f"{CPU}/cpu{min(ids.online)}/topology/die_id")
    if die is None or die < 0:
        return {}
    return _inside(sockets, group(ids, lambda cpu: _members(root, cpu, DIE_FILES)).of, ids)


def _inside(outer: Grouping, inner: Grouping, ids: CpuIds) -> Grouping:
    """The inner groups of the online CPUs; those that cross the border of an outer group are cut there."""
    named: dict[tuple[int, int], int] = {}
    used: set[int] = set()
    for cpu in sorted(ids.online):
        part = outer[cpu], inner[cpu]
        if part not in named:
            named[part] = cpu if inner[cpu] in used else inner[cpu]
            used.add(inner[cpu])
    return {cpu: named[outer[cpu], inner[cpu]] for cpu in ids.online}


def read_kinds(root: Root, ids: CpuIds, cpu: CpuInfo) -> Kinds:
    """The kind of each online CPU; empty where all are alike.

    Clock rates tell nothing of other processors: those of equal cores differ too.
    Source: /sys/devices/cpu_core, cpu_atom, cpu_lowpower (Intel); cpu_capacity (Arm, Documentation/devicetree).
    """
    fast = root.cpulist("sys/devices/cpu_core/cpus")
    slow = root.cpulist("sys/devices/cpu_atom/cpus") or frozenset()
    if fast and slow:
        slow |= root.cpulist("sys/devices/cpu_lowpower/cpus") or frozenset()
        return {cpu_id: "efficiency" if cpu_id in slow else "performance" for cpu_id in ids.online}
    if (cpu.vendor, cpu.family, cpu.model) == LAKEFIELD:
        return _below(_numbers_in(root, ids, "cpufreq/base_frequency"), share=1.0)
    if len(ids.online) > MAX_HYBRID_CPUS or not root.exists(f"{CPU}/cpu{min(ids.online)}/cpu_capacity"):
        return {}
    return _below(_numbers_in(root, ids, "cpu_capacity"), share=EFFICIENCY_SHARE)


def _numbers_in(root: Root, ids: CpuIds, name: str) -> dict[int, int]:
    return {cpu: root.integer(f"{CPU}/cpu{cpu}/{name}") or 0 for cpu in ids.online}


def _below(numbers: dict[int, int], *, share: float) -> Kinds:
    """Efficiency for the CPUs whose number is below this share of the largest; empty if there are none."""
    limit = max(numbers.values()) * share
    if min(numbers.values()) >= limit:
        return {}
    return {cpu: "efficiency" if number < limit else "performance" for cpu, number in numbers.items()}


def _node_of(nodes: tuple[NumaNode, ...]) -> Grouping:
    """The NUMA node of each CPU; where cpumaps overlap, the smallest node, then the lowest id."""
    node_of: Grouping = {}
    for node in sorted(nodes, key=lambda node: (len(node.cpus), node.id)):
        for cpu in node.cpus:
            node_of.setdefault(cpu, node.id)
    return node_of
