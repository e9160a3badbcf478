"""The pool as nested regions (socket, NUMA node, L3 cache), and how many workers of one size fit in them."""

from __future__ import annotations

from cpulaunch.plan.placement.pool import Core
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

Key: TypeAlias = "Callable[[Core], object]"


@record(kw_only=False)
class Region:
    """Cores that share a socket, NUMA node or L3 cache, in topological order, and the smaller regions inside."""

    cores: tuple[Core, ...]
    inner: tuple[Region, ...] = ()

    @property
    def node_count(self) -> int:
        """The number of NUMA nodes (or parts of one, see by_node) inside."""
        return len({by_node(core) for core in self.cores})


def groups(cores: Sequence[Core], key: Key) -> list[list[Core]]:
    """The cores grouped by key, in the order of the first core of each group."""
    found: dict[object, list[Core]] = {}
    for core in cores:
        found.setdefault(key(core), []).append(core)
    return list(found.values())


def region_of(cores: Sequence[Core], keys: Sequence[Key]) -> Region:
    """The tree of regions: the first key splits the outermost one. A level with a single region is left out."""
    if not keys:
        return Region(tuple(cores))
    inner = tuple(region_of(group, keys[1:]) for group in groups(cores, keys[0]))
    if len(inner) == 1:
        return inner[0]
    return Region(tuple(core for region in inner for core in region.cores), inner)


def by_node(core: Core) -> object:
    """The part of a NUMA node inside one socket: with NUMA off, a node spans several."""
    return (core.socket, core.numa_node)


def by_l3(core: Core) -> object:
    """The part of an L3 inside one NUMA node: with sub-NUMA clustering an L3 may span several."""
    return core.l3


def outermost(cores: Sequence[Core]) -> Key:
    """The key of the regions that hold several `by_node` regions: sockets, or with NUMA off the one node."""
    nodes = {by_node(core) for core in cores}
    sockets = {core.socket for core in cores}
    return (lambda core: core.socket) if len(sockets) < len(nodes) else (lambda core: core.numa_node)


def capacity(region: Region, size: int) -> int:
    """The number of workers of `size` cores that fit, none crossing an inner region that it fits inside."""
    total = 0
    fits_inner = False
    for inner in region.inner:
        if len(inner.cores) >= size:
            fits_inner = True
            total += capacity(inner, size)
    return total if fits_inner else len(region.cores) // size


def deal(region: Region, size: int, count: int, *, spread: bool) -> list[tuple[Region, int]]:
    """Regions to divide and how many of `count` workers each gets, in topological order."""
    inner = [part for part in region.inner if len(part.cores) >= size]
    if not inner:
        return [(region, count)]
    room = [capacity(part, size) for part in inner]
    weights = [part.node_count for part in inner]
    shares = _evenly(count, room, weights) if spread else _in_order(count, room)
    return [
        dealt
        for part, share in zip(inner, shares, strict=True)
        if share
        for dealt in deal(part, size, share, spread=spread)
    ]


def _evenly(count: int, room: Sequence[int], weights: Sequence[int]) -> list[int]:
    """How many workers each region gets if each worker goes to the least loaded region that has room."""
    shares = [0] * len(room)
    for _ in range(count):
        free = [index for index in range(len(room)) if shares[index] < room[index]]
        shares[min(free, key=lambda index: (shares[index] / weights[index], index))] += 1
    return shares


def _in_order(count: int, room: Sequence[int]) -> list[int]:
    """How many workers each region gets if the first regions are filled first."""
    shares = []
    for space in room:
        shares.append(min(space, count))
        count -= shares[-1]
    return shares


def last_cores(cores: Sequence[Core], count: int) -> frozenset[Core]:
    """`count` cores, taken evenly from all NUMA nodes: the last ones of each, those of its last L3 cache first."""
    nodes = [[core for cache in groups(node, by_l3) for core in cache] for node in groups(cores, by_node)]
    nodes.reverse()  # What does not divide evenly comes from the last nodes.
    room = [len(node) - 1 for node in nodes]
    if sum(room) < count:  # Nodes of one or two cores: some of them are given up entirely.
        room = [len(node) for node in nodes]
    shares = _evenly(count, room, [1] * len(nodes))
    return frozenset(core for node, share in zip(nodes, shares, strict=True) for core in node[len(node) - share :])
