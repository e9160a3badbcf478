"""Facts about one machine, as read; nothing here decides or reads anything.

Ids of cores, L3 groups, sockets and dies are the lowest logical CPU id of the group, offline CPUs
included: unique on the machine, which the kernel's core_id and physical_package_id are not.
"""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

CoreKind: TypeAlias = 'Literal["performance", "efficiency"]'
CacheType: TypeAlias = 'Literal["Unified", "Data", "Instruction"]'
Permission: TypeAlias = 'Literal["permitted", "denied", "unknown"]'
LibraryKind: TypeAlias = 'Literal["allocator", "openmp", "mkl-dispatch"]'


@record
class LogicalCpu:
    """One online logical CPU and the groups it belongs to; None where the machine does not say."""

    id: int
    core: int
    socket: int
    die: int | None = None
    l3: int | None = None
    numa_node: int | None = None
    kind: CoreKind | None = None


@record
class NumaNode:
    """One NUMA node: its online CPUs, its memory, and its distance to every node (itself too)."""

    id: int
    cpus: frozenset[int]
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: tuple[tuple[int, int], ...] = ()

    @property
    def memory_only(self) -> bool:
        """Whether the node has memory and no CPU (HBM, CXL, a GPU's memory)."""
        return not self.cpus and self.memory_bytes != 0


@record
class Cache:
    """One cache and the online CPUs that share it."""

    level: int
    type: CacheType
    cpus: frozenset[int]
    bytes: int | None = None


@record
class CpuInfo:
    """Who made the CPU and what it can do; `isa` holds normalized feature names (see FEATURES).

    On Arm `vendor` is the implementer's name as lscpu prints it ("ARM" for 0x41, "Ampere" for 0xc0, "NVIDIA" for
    0x4e) and `model` the part number (0xd0c is Neoverse N1). `platform` is who sells the machine, as DMI says
    ("Amazon EC2", "Google"): it tells Graviton from Ampere Altra, which have the same core.
    Source of `platform`: /sys/class/dmi/id/sys_vendor. `current_mhz` is the mean of all CPUs; both frequencies are read
    for `probe` and `doctor` only.
    """

    vendor: str | None = None
    model_name: str | None = None
    family: int | None = None
    model: int | None = None
    isa: frozenset[str] = frozenset()
    platform: str | None = None
    current_mhz: float | None = None
    max_mhz: float | None = None


FEATURES = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "neon",
    "asimddp",
    "fp16",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
    "sme",
    "vsx",
    "rvv",
)
"""Feature names every probe answers; `bf16`, `i8mm`, `fp16` are the Arm ones."""


@record
class Quota:
    """The tightest CPU bandwidth limit among this process's cgroups, in CPUs, and its file."""

    cpus: float
    source: str

    @property
    def threads(self) -> int:
        """Threads it pays for at a time: its CPUs rounded up, at least 1."""
        return max(1, -int(-self.cpus // 1))  # Not math.ceil: a launch would import math for this alone.


@record
class Budget:
    """The CPUs this process may really use and how many threads of them at a time."""

    cpus: frozenset[int]
    threads: int
    limited_by: str


@record
class Limits:
    """What confines this process; `memory_nodes` are the NUMA nodes it may allocate on."""

    affinity: frozenset[int]
    cpuset: frozenset[int] | None = None
    memory_nodes: frozenset[int] | None = None
    quota: Quota | None = None
    memory_bytes: int | None = None
    memory_source: str | None = None
    memory_events: str | None = None
    """The file of this process's own cgroup that counts out-of-memory kills, under the root."""
    budget: Budget


@record
class Kernel:
    """Kernel settings that change speed; None where the file is absent."""

    release: str | None = None
    transparent_hugepage: str | None = None
    numa_balancing: bool | None = None
    governor: str | None = None
    smt: str | None = None
    isolated_cpus: frozenset[int] = frozenset()
    mempolicy: Permission = "unknown"
    page_bytes: int | None = None


@record
class Library:
    """A library found on this machine that a worker can preload.

    `untrusted` says why it may not be preloaded: None, or the file or directory others may write.
    """

    kind: LibraryKind
    name: str
    path: str
    untrusted: str | None = None


@record
class MigInstance:
    """One MIG device of an NVIDIA GPU: a compute instance inside a GPU instance.

    `uuid` ("MIG-…") only NVML knows.
    """

    gpu_instance: int
    compute_instance: int
    uuid: str | None = None


@record
class Gpu:
    """One GPU as sysfs shows it, in PCI order.

    `device` is the PCI device id: GPUs of one model have the same. `driver` is the kernel's driver, if one is bound.
    `accessible`: whether this process may use it, as far as device files tell (a container is given some of them).
    `tiles`: parts that Level Zero shows as devices of their own (Intel).
    """

    index: int
    vendor: str
    pci: str
    uuid: str | None = None
    numa_node: int | None = None
    cpus: frozenset[int] = frozenset()
    device: int | None = None
    model: str | None = None
    driver: str | None = None
    accessible: bool = True
    mig: tuple[MigInstance, ...] = ()
    tiles: int = 1


EXTENSIONS = ("intel_extension_for_pytorch", "zentorch")
"""Packages that settings ask for by name."""


@record
class Torch:
    """The torch of the worker's environment, from its files (it is never imported here).

    `extensions`: packages beside it that change how it computes, of EXTENSIONS. `plugin`: whether torch will find
    cpulaunch's entry point there.
    """

    version: str
    path: str
    bundled_openmp: str | None = None
    mkl_dispatch_symbol: bool = False
    extensions: tuple[str, ...] = ()
    plugin: bool = False

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version; None if the version is not made of numbers."""
        parts = self.version.split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts[:2]):
            return None
        return int(parts[0]), int(parts[1])


@record
class Host:
    """Everything known about a machine. `sysroot` is None for the one this process runs on.

    `can_bind`: whether its operating system lets a process choose its CPUs (macOS does not).
    """

    arch: str
    cpu: CpuInfo
    cpus: tuple[LogicalCpu, ...]
    limits: Limits
    offline_cpus: frozenset[int] = frozenset()
    numa_nodes: tuple[NumaNode, ...] = ()
    caches: tuple[Cache, ...] = ()
    kernel: Kernel = Kernel()
    memory_bytes: int | None = None
    libraries: tuple[Library, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    torch: Torch | None = None
    container: bool = False
    sysroot: str | None = None
    can_bind: bool = True

    @property
    def torch_release(self) -> tuple[int, int] | None:
        """Major and minor version of the worker's torch; None if there is no torch or its version is unusual."""
        return None if self.torch is None else self.torch.release


def size_text(size_bytes: int | None) -> str:
    """A number of bytes in the largest binary unit that keeps it at least 1 ("1.5 MiB"); empty for None."""
    if size_bytes is None:
        return ""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")
    return f"{text} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def count_text(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless the number is 1: "1 core", "1,024 cores"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
