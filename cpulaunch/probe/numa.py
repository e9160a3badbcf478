"""NUMA nodes: their online CPUs, memory and distances.

Source: kernel, Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

from cpulaunch.probe.topology import CpuIds
from cpulaunch.records.host import NumaNode
from cpulaunch.records.record import replace
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NODE = "sys/devices/system/node"
MEMINFO = "proc/meminfo"
MAX_NODES = 1 << 10
"""NUMA nodes of any kernel build, each of which has a distance to each. Source: Linux, Kconfig, NODES_SHIFT."""


def read_numa_nodes(root: Root, ids: CpuIds) -> tuple[NumaNode, ...]:
    """Every NUMA node by id; empty where the kernel has no NUMA.

    A single node has the machine's memory: a hypervisor that adds memory may leave the node's own figure behind.
    """
    numbers = (natural(name[4:]) for name in root.names(NODE) if name.startswith("node"))
    node_ids = sorted(number for number in numbers if number is not None and number < MAX_NODES)
    nodes = tuple(_numa_node(root, node, ids, node_ids) for node in node_ids)
    if len(nodes) != 1 or not unlisted_bytes(root, node_ids):
        return nodes
    machine = _meminfo(root, MEMINFO)
    return (replace(nodes[0], memory_bytes=machine["MemTotal"], free_bytes=machine.get("MemFree")),)


def unlisted_bytes(root: Root, node_ids: Iterable[int]) -> int:
    """How much of the machine's memory the NUMA nodes lack, if they have less than half of it; else 0."""
    listed = sum(_meminfo(root, f"{NODE}/node{node}/meminfo").get("MemTotal", 0) for node in node_ids)
    lost = (read_memory(root) or 0) - listed
    return lost if 0 < listed < lost else 0


def read_memory(root: Root) -> int | None:
    """The machine's memory in bytes. Source: /proc/meminfo."""
    return _meminfo(root, MEMINFO).get("MemTotal")


def _numa_node(root: Root, node: int, ids: CpuIds, node_ids: list[int]) -> NumaNode:
    base = f"{NODE}/node{node}"
    listed = root.cpulist(f"{base}/cpulist")
    cpus = root.cpumask(f"{base}/cpumap") if listed is None else listed
    online = (cpus or frozenset()) & ids.online
    memory = _meminfo(root, f"{base}/meminfo")
    return NumaNode(
        id=node,
        cpus=online,
        memory_bytes=memory.get("MemTotal"),
        free_bytes=memory.get("MemFree"),
        distances=_distances(root, f"{base}/distance", node_ids),
        initiators=frozenset() if online else _initiators(root, base),
    )


def _initiators(root: Root, base: str) -> frozenset[int]:
    """The NUMA nodes whose CPUs reach this node's memory fastest; empty if the kernel does not say.

    Source: kernel, Documentation/admin-guide/mm/numaperf.rst (access1 names nodes with CPUs, access0 devices too).
    """
    for access in ("access1", "access0"):
        numbers = (natural(name[4:]) for name in root.names(f"{base}/{access}/initiators") if name.startswith("node"))
        found = frozenset(number for number in numbers if number is not None)
        if found:
            return found
    return frozenset()


def _distances(root: Root, name: str, node_ids: list[int]) -> tuple[tuple[int, int], ...]:
    """The distance to each online NUMA node, in the order of their ids; empty if the counts differ."""
    text = root.text(name)
    if text is None:
        return ()
    try:
        values = [int(word) for word in text.split()]
    except ValueError:
        raise root.malformed("row of distances", text, name) from None
    return tuple(zip(node_ids, values, strict=True)) if len(values) == len(node_ids) else ()


def _meminfo(root: Root, name: str) -> dict[str, int]:
    """Bytes by name, of lines such as "MemTotal: 12 kB" or "Node 0 MemTotal: 12 kB" (the first two that matter)."""
    found: dict[str, int] = {}
    for line in (root.text(name) or "").splitlines():
        key, colon, value = line.partition(":")
        key = key.rpartition(" ")[2]
        if colon and key in ("MemTotal", "MemFree"):
            number = natural(value.split(None, 1)[0]) if value.strip() else None
            if number is None:
                raise root.malformed("size in kB", line, name)
            found[key] = number << 10
        if len(found) == 2:
            break
    return found
