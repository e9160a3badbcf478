"""Caches and who shares them, by shared_cpu_map: cache ids collide on some machines and are not used.

Source: kernel, Documentation/ABI/testing/sysfs-devices-system-cpu (/sys/devices/system/cpu/cpuX/cache).
"""

from cpulaunch.probe.topology import CPU, CpuIds, Grouping, Groups, core_members
from cpulaunch.records.host import Cache, CacheType, LogicalCpu
from cpulaunch.records.record import replace
from cpulaunch.system.root import Root, natural

UNIT = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TYPES: dict[str, CacheType] = {"Unified": "Unified", "Data": "Data", "Instruction": "Instruction"}
MAX_CACHES = 32
"""Of one CPU; processors have six at most. In a captured machine, each CPU's folder may be a link to thousands."""
LAST_INDEX = "index3"
"""Where the L3 is on nearly every machine; others are searched."""


def read_l3(root: Root, ids: CpuIds) -> tuple[tuple[Cache, ...], Grouping]:
    """The L3 caches and the L3 of each CPU, with one look per cache."""
    groups = Groups()
    caches = []
    for cpu in sorted(ids.online):
        if cpu in groups.of:
            continue
        directory = _l3_directory(root, cpu)
        if directory is None:
            if not _directories(root, cpu):
                break  # A kernel that describes no caches of one CPU describes none.
            continue
        cpus = groups.add(cpu, _sharers(root, directory, cpu), ids)
        caches.append(Cache(level=3, type=_type(root, directory), cpus=cpus, bytes=_size(root, directory)))
    return tuple(caches), groups.of


def read_caches(root: Root, ids: CpuIds) -> tuple[tuple[Cache, ...], Grouping]:
    """All caches, by level, type and lowest CPU, and the L3 of each CPU."""
    found: dict[tuple[int, CacheType], Groups] = {}
    caches = []
    for cpu in sorted(ids.online):
        for directory in _directories(root, cpu):
            level = root.integer(f"{directory}/level")
            if level is None:
                continue
            key = level, _type(root, directory)
            groups = found.setdefault(key, Groups())
            if cpu not in groups.of:
                cpus = groups.add(cpu, _sharers(root, directory, cpu), ids)
                caches.append(Cache(level=level, type=key[1], cpus=cpus, bytes=_size(root, directory)))
    caches.sort(key=lambda cache: (cache.level, cache.type, min(cache.cpus)))
    l3 = found.get((3, "Unified")) or found.get((3, "Data")) or Groups()
    return tuple(caches), l3.of


def join_split_l3(
    caches: tuple[Cache, ...], cpus: tuple[LogicalCpu, ...]
) -> tuple[tuple[Cache, ...], tuple[LogicalCpu, ...]]:
    """The caches and CPUs, with those L3s made one whose files part the CPUs of a core."""
    l3s = _l3_by_core(cpus)
    if all(l3s.get(cpu.core) == cpu.l3 for cpu in cpus):
        return caches, cpus
    joined_cpus = tuple(replace(cpu, l3=l3s.get(cpu.core)) for cpu in cpus)
    l3_of = {cpu.id: cpu.l3 for cpu in joined_cpus}
    kept: dict[object, Cache] = {}
    for cache in caches:
        low = l3_of[min(cache.cpus)] if cache.level == 3 else None
        key: object = cache if low is None else (cache.type, low)
        members = cache.cpus if low is None else frozenset(cpu for cpu, l3 in l3_of.items() if l3 == low)
        kept.setdefault(key, replace(cache, cpus=members))
    return tuple(kept.values()), joined_cpus


def _l3_by_core(cpus: tuple[LogicalCpu, ...]) -> Grouping:
    """The L3 of each core that has one; L3s with a common core have the lowest id of them."""
    first: Grouping = {}
    joined: Grouping = {}

    def last(l3: int) -> int:
        while l3 in joined:
            l3 = joined[l3]
        return l3

    for cpu in cpus:
        if cpu.l3 is not None:
            low, high = sorted((last(first.setdefault(cpu.core, cpu.l3)), last(cpu.l3)))
            if low != high:
                joined[high] = low
    return {core: last(l3) for core, l3 in first.items()}


def _directories(root: Root, cpu: int) -> list[str]:
    base = f"{CPU}/cpu{cpu}/cache"
    names = sorted(name for name in root.names(base) if name.startswith("index"))
    return [f"{base}/{name}" for name in names[:MAX_CACHES]]


def _l3_directory(root: Root, cpu: int) -> str | None:
    usual = f"{CPU}/cpu{cpu}/cache/{LAST_INDEX}"
    if root.text(f"{usual}/level") == "3":
        return usual
    return next((name for name in _directories(root, cpu) if root.text(f"{name}/level") == "3"), None)


def _sharers(root: Root, directory: str, cpu: int) -> frozenset[int]:
    """The CPUs that share the cache.

    The mask comes before the list: Linux 3 lists each CPU alone for what an AMD module shares. Old ia64 kernels
    write an empty mask: then the cache is the core's own.
    """
    mask = root.cpumask(f"{directory}/shared_cpu_map")
    shared = root.cpulist(f"{directory}/shared_cpu_list") if mask is None else mask
    return shared or core_members(root, cpu) or frozenset({cpu})


def _type(root: Root, directory: str) -> CacheType:
    return TYPES.get(root.text(f"{directory}/type") or "", "Unified")


def _size(root: Root, directory: str) -> int | None:
    text = root.text(f"{directory}/size")
    if text is None:
        return None
    digits = text.removesuffix("B").rstrip("KMG ")
    number = natural(digits)
    if number is None:
        raise root.malformed("cache size", text, f"{directory}/size")
    return number * UNIT.get(text[len(digits) :].strip(" B"), 1) or None
