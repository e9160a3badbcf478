"""The pool as nested regions (socket, NUMA node, L3) and how many instances of one size they hold."""

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
    """Cores that share something, in topological order, and the smaller regions they fall into."""

    cores: tuple[Core, ...]
    inner: tuple[Region, ...] = ()

    @property
    def nodes(self) -> int:
        """How many NUMA nodes (or parts of one, see by_node) are inside."""
        return len({by_node(core) for core in self.cores})


def groups(cores: Sequence[Core], key: Key) -> list[list[Core]]:
    """The cores for which the key is equal, together, in the order in which the first of each group comes."""
    found: dict[object, list[Core]] = {}
    for core in cores:
        found.setdefault(key(core), []).append(core)
    return list(found.values())


def region_of(cores: Sequence[Core], keys: Sequence[Key]) -> Region:
    """The tree of regions: the first key splits outermost. A level that splits nothing is left out."""
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
    """The key of what holds several `by_node` regions: a socket, or with NUMA off the one node."""
    nodes = {by_node(core) for core in cores}
    sockets = {core.socket for core in cores}
    return (lambda core: core.socket) if len(sockets) < len(nodes) else (lambda core: core.numa_node)


def capacity(region: Region, size: int) -> int:
    """How many instances of `size` cores fit, none crossing an inner region that it fits inside."""
    held = 0
    fits_inner = False
    for inner in region.inner:
        if len(inner.cores) >= size:
            fits_inner = True
            held += capacity(inner, size)
    return held if fits_inner else len(region.cores) // size


def deal(region: Region, size: int, count: int, *, spread: bool) -> list[tuple[Region, int]]:
    """Regions to divide and how many of `count` instances each gets, in topological order."""
    inner = [part for part in region.inner if len(part.cores) >= size]
    if not inner:
        return [(region, count)]
    room = [capacity(part, size) for part in inner]
    weights = [part.nodes for part in inner]
    shares = _evenly(count, room, weights) if spread else _in_order(count, room)
    return [
        dealt
        for part, share in zip(inner, shares, strict=True)
        if share
        for dealt in deal(part, size, share, spread=spread)
    ]


def _evenly(count: int, room: Sequence[int], weights: Sequence[int]) -> list[int]:
    """One at a time to the least loaded region that has room, the first of equals."""
    shares = [0] * len(room)
    for _ in range(count):
        open_ = [i for i in range(len(room)) if shares[i] < room[i]]
        least = min(open_, key=lambda i: (shares[i] / weights[i], i))
        shares[least] += 1
    return shares


def _in_order(count: int, room: Sequence[int]) -> list[int]:
    shares = []
    for space in room:
        shares.append(min(space, count))
        count -= shares[-1]
    return shares


def last_cores(cores: Sequence[Core], count: int) -> frozenset[Core]:
    """`count` cores: as many of every NUMA node and socket, each time the last ones, of the last L3 first."""
    nodes: dict[object, list[Core]] = {}
    for core in cores:
        nodes.setdefault(by_node(core), []).append(core)
    regions = [_by_l3(members) for members in nodes.values()]
    room = [len(region) - 1 for region in regions]
    if sum(room) < count:  # Every NUMA node has a core or two: some are left to the loaders alone.
        room = [len(region) for region in regions]
    shares = [0] * len(regions)
    for _ in range(count):
        open_ = [index for index in range(len(regions)) if shares[index] < room[index]]
        shares[min(open_, key=lambda index: (shares[index], -index))] += 1
    return frozenset(
        core for region, share in zip(regions, shares, strict=True) for core in region[len(region) - share :]
    )


def _by_l3(cores: Sequence[Core]) -> list[Core]:
    """The cores of one node, those of one L3 next to each other."""
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    return [core for group in groups.values() for core in group]
