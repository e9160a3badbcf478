"""Synthetic machines: a directory tree with the /sys and /proc files of a machine of any shape.

`write_root(path, spec)` writes one; `host_of(spec)` also probes it. File formats follow the kernel's
Documentation/ABI (sysfs-devices-system-cpu, sysfs-devices-node) and cgroup-v1/v2 documents.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.cpulist import format_cpulist, parse_cpulist
from cpulaunch.records.host import Host

GIB = 1 << 30
XEON_FLAGS = "fpu sse2 avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8"
EPYC_FLAGS = "fpu sse2 avx2 fma avx_vnni avx512f avx512_vnni avx512_bf16"
NEOVERSE_FEATURES = "fp asimd fphp asimdhp asimddp sve i8mm bf16"


@dataclass(frozen=True, kw_only=True)
class X86Cpu:
    """The /proc/cpuinfo fields of an x86 CPU."""

    vendor: str = "GenuineIntel"
    family: int = 6
    model: int = 143
    model_name: str = "Synthetic Xeon"
    flags: str = XEON_FLAGS

    arch = "x86_64"

    def block(self) -> str:
        return (
            f"vendor_id\t: {self.vendor}\ncpu family\t: {self.family}\nmodel\t\t: {self.model}\n"
            f"model name\t: {self.model_name}\nflags\t\t: {self.flags}\n"
        )


@dataclass(frozen=True, kw_only=True)
class ArmCpu:
    """The /proc/cpuinfo fields of an Arm CPU (without a model name, as on servers)."""

    implementer: int = 0x41
    part: int = 0xD4F
    features: str = NEOVERSE_FEATURES

    arch = "aarch64"

    def block(self) -> str:
        return (
            f"BogoMIPS\t: 100.00\nFeatures\t: {self.features}\nCPU implementer\t: {self.implementer:#x}\n"
            f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {self.part:#x}\nCPU revision\t: 0\n"
        )


EPYC = X86Cpu(vendor="AuthenticAMD", family=25, model=17, model_name="Synthetic EPYC", flags=EPYC_FLAGS)
XEON = X86Cpu()
GRACE = ArmCpu()


@dataclass(frozen=True, kw_only=True)
class RootSpec:
    """The shape of a machine. Lists of ids are cpulists ("0-3,8"); `files` are added last, by relative path.

    `efficiency_cores` are single-threaded, follow all other cores and belong to the last NUMA node, with their own
    L3. `numbering` is the order of logical CPU ids: linux (all first threads, then all second threads),
    adjacent (siblings follow one another), interleaved (like linux, alternating between sockets).
    """

    sockets: int = 1
    numa_per_socket: int = 1
    l3_per_numa: int = 1
    cores_per_l3: int = 4
    smt: int = 1
    numbering: Literal["linux", "adjacent", "interleaved"] = "linux"
    efficiency_cores: int = 0
    offline: str = ""
    memory_only: int = 0
    node_memory_bytes: int = 64 * GIB
    node_ids: tuple[int, ...] | None = None
    node_directory: bool = True
    cpu: X86Cpu | ArmCpu = XEON
    affinity: str | None = None
    mems_allowed: str | None = None
    cgroup: Literal[None, "v1", "v2"] = None
    cgroup_path: str = "/job"
    quota_cpus: float | None = None
    cpuset: str | None = None
    memory_limit_bytes: int | None = None
    hex_masks_only: bool = False
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Core:
    socket: int
    node: int
    l3: int
    cpus: tuple[int, ...]


class _Layout:
    """The logical CPUs of each core, L3, NUMA node and socket of a spec."""

    def __init__(self, spec: RootSpec) -> None:
        self.spec = spec
        self.cores = list(_cores(spec))
        self.present = frozenset(c for core in self.cores for c in core.cpus)
        self.offline = parse_cpulist(spec.offline)
        self.online = self.present - self.offline
        count = spec.sockets * spec.numa_per_socket
        self.node_ids = spec.node_ids or tuple(range(count + spec.memory_only))

    def cpus(self, **where: int) -> frozenset[int]:
        matching = (core for core in self.cores if all(getattr(core, k) == v for k, v in where.items()))
        return frozenset(c for core in matching for c in core.cpus)


def _cores(spec: RootSpec) -> Iterator[_Core]:
    per_node = spec.l3_per_numa * spec.cores_per_l3
    per_socket = spec.numa_per_socket * per_node
    total = spec.sockets * per_socket
    for core in range(total):
        socket, within = divmod(core, per_socket)
        first = within * spec.sockets + socket if spec.numbering == "interleaved" else core
        if spec.numbering == "adjacent":
            cpus = tuple(range(core * spec.smt, (core + 1) * spec.smt))
        else:
            cpus = tuple(first + thread * total for thread in range(spec.smt))
        yield _Core(socket=socket, node=core // per_node, l3=core // spec.cores_per_l3, cpus=cpus)
    last_node = spec.sockets * spec.numa_per_socket - 1
    for extra in range(spec.efficiency_cores):
        yield _Core(socket=spec.sockets - 1, node=last_node, l3=total, cpus=(total * spec.smt + extra,))


def cpumask(cpus: frozenset[int], bits: int) -> str:
    """The kernel's mask format: 32-bit hexadecimal words, the most significant first."""
    words = max(1, -(-bits // 32))
    value = sum(1 << cpu for cpu in cpus)
    return ",".join(f"{value >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))


def root_files(spec: RootSpec) -> dict[str, str]:
    """The text of each file of the machine, by relative path."""
    layout = _Layout(spec)
    files: dict[str, str] = {}
    for part in (_cpu_files, _topology_files, _node_files, _proc_files, _cgroup_files):
        files.update(part(layout))
    return {**files, **spec.files}


class MemoryRoot(Root):
    """The files of a machine without a directory: ten times as fast as one that is written."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__("/nonexistent")
        self.files = files
        self.children: dict[str, set[str]] = {}
        for name in files:
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                self.children.setdefault("/".join(parts[: depth - 1]), set()).add(parts[depth - 1])

    def bytes(self, name: str, *, limit: int = 1 << 24) -> bytes | None:
        return self.files[name].encode()[:limit] if name in self.files else None

    def names(self, name: str) -> list[str]:
        return sorted(self.children.get(name, ()))

    def exists(self, name: str) -> bool:
        return name in self.files or name in self.children


def write_root(path: Path, spec: RootSpec) -> Path:
    """The path. Effect: creates it and writes the files of the machine into it."""
    made: set[Path] = set()
    for name, text in root_files(spec).items():
        target = path / name
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        target.write_text(text if text.endswith("\n") else text + "\n")
    return path


def host_of(spec: RootSpec, *, detail: Literal["launch", "full"] = "full") -> Host:
    """The probed Host of a synthetic machine."""
    with tempfile.TemporaryDirectory() as directory:
        return probe_host(Root(str(write_root(Path(directory), spec))), detail=detail)


def _cpu_files(layout: _Layout) -> dict[str, str]:
    base = "sys/devices/system/cpu"
    present = format_cpulist(layout.present)
    files = {
        f"{base}/present": present,
        f"{base}/possible": present,
        f"{base}/online": format_cpulist(layout.online),
        f"{base}/offline": format_cpulist(layout.offline),
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "proc/sys/kernel/numa_balancing": "1",
    }
    for cpu in sorted(layout.present - {0}):
        files[f"{base}/cpu{cpu}/online"] = str(int(cpu in layout.online))
    efficiency = frozenset(c for core in layout.cores[-layout.spec.efficiency_cores :] for c in core.cpus)
    if layout.spec.efficiency_cores:
        files["sys/devices/cpu_core/cpus"] = format_cpulist(layout.online - efficiency)
        files["sys/devices/cpu_atom/cpus"] = format_cpulist(layout.online & efficiency)
    return files


def _masks(layout: _Layout, stem: str, suffix: str, cpus: frozenset[int]) -> dict[str, str]:
    """The files of one group: a mask and, without `hex_masks_only`, a list. The kernel shows online CPUs only."""
    shown = cpus & layout.online
    files = {stem: cpumask(shown, max(layout.present) + 1)}
    if not layout.spec.hex_masks_only:
        files[suffix] = format_cpulist(shown)
    return files


def _topology_files(layout: _Layout) -> dict[str, str]:
    files: dict[str, str] = {}
    sockets = {core.socket: layout.cpus(socket=core.socket) for core in layout.cores}
    l3s = {core.l3: layout.cpus(l3=core.l3) for core in layout.cores}
    for index, core in enumerate(layout.cores):
        siblings = frozenset(core.cpus)
        shared = (("Data", 1, "48K"), ("Instruction", 1, "32K"), ("Unified", 2, "2048K"), ("Unified", 3, "32768K"))
        for cpu in siblings & layout.online:
            base = f"sys/devices/system/cpu/cpu{cpu}"
            topology = f"{base}/topology"
            files[f"{topology}/core_id"] = str(index)
            files[f"{topology}/physical_package_id"] = str(core.socket)
            for stem, cpus in (("thread_siblings", siblings), ("core_siblings", sockets[core.socket])):
                files |= _masks(layout, f"{topology}/{stem}", f"{topology}/{stem}_list", cpus)
            for number, (type_, level, size) in enumerate(shared):
                cache = f"{base}/cache/index{number}"
                files |= {f"{cache}/level": str(level), f"{cache}/type": type_, f"{cache}/size": size}
                cpus = l3s[core.l3] if level == 3 else siblings
                files |= _masks(layout, f"{cache}/shared_cpu_map", f"{cache}/shared_cpu_list", cpus)
    return files


def _node_files(layout: _Layout) -> dict[str, str]:
    spec = layout.spec
    if not spec.node_directory:
        return {}
    base = "sys/devices/system/node"
    files = {f"{base}/{name}": format_cpulist(layout.node_ids) for name in ("online", "possible", "has_memory")}
    with_cpus = spec.sockets * spec.numa_per_socket
    for index, node in enumerate(layout.node_ids):
        cpus = layout.cpus(node=index)
        files |= _masks(layout, f"{base}/node{node}/cpumap", f"{base}/node{node}/cpulist", cpus)
        total, free = spec.node_memory_bytes >> 10, spec.node_memory_bytes >> 11
        files[f"{base}/node{node}/meminfo"] = (
            f"Node {node} MemTotal:       {total} kB\nNode {node} MemFree:        {free} kB"
        )
        distances = (_distance(spec, index, other, with_cpus) for other in range(len(layout.node_ids)))
        files[f"{base}/node{node}/distance"] = " ".join(map(str, distances))
    files[f"{base}/has_cpu"] = format_cpulist(layout.node_ids[:with_cpus])
    return files


def _distance(spec: RootSpec, one: int, other: int, with_cpus: int) -> int:
    if one == other:
        return 10
    if max(one, other) >= with_cpus:
        return 24
    return 12 if one // spec.numa_per_socket == other // spec.numa_per_socket else 21


def _proc_files(layout: _Layout) -> dict[str, str]:
    spec = layout.spec
    blocks = (f"processor\t: {cpu}\n{spec.cpu.block()}" for cpu in sorted(layout.online))
    total = spec.node_memory_bytes * len(layout.node_ids) >> 10
    files = {
        "proc/cpuinfo": "\n".join(blocks),
        "proc/meminfo": f"MemTotal:       {total} kB\nMemFree:        {total // 2} kB",
        "proc/sys/kernel/arch": spec.cpu.arch,
    }
    if spec.affinity is not None:
        mems = format_cpulist(layout.node_ids) if spec.mems_allowed is None else spec.mems_allowed
        files["proc/self/status"] = f"Name:\tpython\nCpus_allowed_list:\t{spec.affinity}\nMems_allowed_list:\t{mems}"
    return files


def _cgroup_files(layout: _Layout) -> dict[str, str]:
    spec = layout.spec
    if spec.cgroup is None:
        return {}
    quota = -1 if spec.quota_cpus is None else round(spec.quota_cpus * 100_000)
    return (_cgroup_v1 if spec.cgroup == "v1" else _cgroup_v2)(spec, quota)


def _cgroup_v2(spec: RootSpec, quota: int) -> dict[str, str]:
    base = f"sys/fs/cgroup{spec.cgroup_path.rstrip('/')}"
    files = {
        "proc/self/cgroup": f"0::{spec.cgroup_path}",
        "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw",
        f"{base}/cpu.max": f"{'max' if quota < 0 else quota} 100000",
        f"{base}/memory.max": "max" if spec.memory_limit_bytes is None else str(spec.memory_limit_bytes),
    }
    if spec.cpuset is not None:
        files[f"{base}/cpuset.cpus.effective"] = spec.cpuset
    return files


def _cgroup_v1(spec: RootSpec, quota: int) -> dict[str, str]:
    controllers = ("cpu,cpuacct", "cpuset", "memory")
    base, path = "sys/fs/cgroup", spec.cgroup_path.rstrip("/")
    mounts = (
        f"{31 + i} 25 0:{27 + i} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
        for i, name in enumerate(controllers)
    )
    unlimited = 0x7FFFFFFFFFFFF000
    files = {
        "proc/self/cgroup": "\n".join(f"{i}:{name}:{spec.cgroup_path}" for i, name in enumerate(controllers, 1)),
        "proc/self/mountinfo": "\n".join(mounts),
        f"{base}/cpu,cpuacct{path}/cpu.cfs_quota_us": str(quota),
        f"{base}/cpu,cpuacct{path}/cpu.cfs_period_us": "100000",
        f"{base}/memory{path}/memory.limit_in_bytes": str(spec.memory_limit_bytes or unlimited),
    }
    if spec.cpuset is not None:
        files[f"{base}/cpuset{path}/cpuset.effective_cpus"] = spec.cpuset
        files[f"{base}/cpuset{path}/cpuset.cpus"] = spec.cpuset
    return files
