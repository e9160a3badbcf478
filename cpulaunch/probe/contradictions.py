"""Kernel files that contradict one another, and the file that counts: read by doctor alone, because it reads all."""

from __future__ import annotations

from cpulaunch.probe.numa import NODE, unlisted_bytes
from cpulaunch.probe.topology import CORE_FILES, CPU, DIE_FILES, PACKAGE_FILES, CpuIds, package_of, read_cpu_ids
from cpulaunch.records.cpulist import cpus_text
from cpulaunch.records.host import Host, count_text, size_text
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

Lists = dict[int, frozenset[int]]
"""What the files of one name say, by CPU; a CPU without the file, or with an empty one, is left out."""


def read_contradictions(root: Root, host: Host) -> tuple[str, ...]:
    """A clause for each contradiction between the files on sockets, dies, cores, caches and NUMA nodes.

    Raises: ProbeError naming a file that does not parse.
    """
    ids = read_cpu_ids(root)
    return (*_between_forms(root, ids), *_sockets(root, ids), *_between_cpus(root, ids), *_nodes(root, ids, host))


def _between_forms(root: Root, ids: CpuIds) -> Iterator[str]:
    """Masks and lists of the same CPUs, and old and new names of the same file."""
    for names in (PACKAGE_FILES, DIE_FILES, CORE_FILES):
        for name in names:
            masks, lists = _masks(root, ids, f"topology/{name}"), _lists(root, ids, f"topology/{name}_list")
            yield from _differing(masks, lists, f"{name} and {name}_list", "the list counts")
        both = [_members(root, ids, name) for name in names]
        yield from _differing(both[0], both[-1], " and ".join(names), f"{names[0]} counts")
    for index in sorted(name for name in root.names(f"{CPU}/cpu{min(ids.online)}/cache") if name.startswith("index")):
        stem = f"cache/{index}/shared_cpu"
        masks, lists = _masks(root, ids, f"{stem}_map"), _lists(root, ids, f"{stem}_list")
        yield from _differing(masks, lists, f"shared_cpu_map and shared_cpu_list of {index}", "the map counts")


def _differing(one: Lists, other: Lists, what: str, verdict: str) -> Iterator[str]:
    odd = frozenset(cpu for cpu in one.keys() & other.keys() if one[cpu] != other[cpu])
    if odd:
        yield f"{what} differ for {cpus_text(odd)}: {verdict}"


def _sockets(root: Root, ids: CpuIds) -> Iterator[str]:
    packages = {cpu: package_of(root, cpu) for cpu in sorted(ids.online)}
    lists = set(_members(root, ids, PACKAGE_FILES[0]).values())
    unknown = frozenset(cpu for cpu, package in packages.items() if package is None)
    packages_text = count_text(len(set(packages.values())), "package id")
    if unknown and len(unknown) < len(packages):
        yield f"{cpus_text(unknown)} without a package id: sibling lists make the sockets"
    elif not unknown and lists and len(lists) != len(set(packages.values())):
        yield f"{count_text(len(lists), 'sibling list')} for {packages_text}: the ids make the sockets"


def _between_cpus(root: Root, ids: CpuIds) -> Iterator[str]:
    """Groups that CPUs are in and do not name, or that name others whose own groups differ."""
    for names in (PACKAGE_FILES, DIE_FILES, CORE_FILES):
        lists = _members(root, ids, names[0])
        numbers = {own: number for number, own in enumerate(set(lists.values()))}  # Comparing sets is slow.
        of = {cpu: numbers[own] for cpu, own in lists.items()}
        odd = frozenset(
            cpu for cpu, own in lists.items() if cpu not in own or any(of.get(each, of[cpu]) != of[cpu] for each in own)
        )
        if odd:
            yield f"{names[0]} of {cpus_text(odd)} contradict one another: that of the lowest CPU counts"


def _nodes(root: Root, ids: CpuIds, host: Host) -> Iterator[str]:
    seen: dict[int, int] = {}
    shared: set[int] = set()
    for node in host.numa_nodes:
        listed = root.cpulist(f"{NODE}/node{node.id}/cpulist") or root.cpumask(f"{NODE}/node{node.id}/cpumap")
        absent = (listed or frozenset()) - ids.online
        if absent:
            yield f"NUMA node {node.id} names {cpus_text(absent)}, not online: left out"
        shared |= {cpu for cpu in node.cpus if seen.setdefault(cpu, node.id) != node.id}
    lost = unlisted_bytes(root, [node.id for node in host.numa_nodes])
    if lost:
        verdict = "it has all" if len(host.numa_nodes) == 1 else "their own figures count"
        count = count_text(len(host.numa_nodes), "NUMA node")
        yield f"{size_text(lost)} of the machine's {size_text(host.memory_bytes)} in none of {count}: {verdict}"
    if shared:
        yield f"{cpus_text(shared)} in several NUMA nodes: the smallest counts"


def _members(root: Root, ids: CpuIds, name: str) -> Lists:
    return _masks(root, ids, f"topology/{name}") | _lists(root, ids, f"topology/{name}_list")


def _lists(root: Root, ids: CpuIds, name: str) -> Lists:
    return {cpu: found for cpu in sorted(ids.online) if (found := root.cpulist(f"{CPU}/cpu{cpu}/{name}"))}


def _masks(root: Root, ids: CpuIds, name: str) -> Lists:
    return {cpu: found for cpu in sorted(ids.online) if (found := root.cpumask(f"{CPU}/cpu{cpu}/{name}"))}
