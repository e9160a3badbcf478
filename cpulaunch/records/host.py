"""Facts about one machine, as the probe reads them.

The id of a core, L3 group, socket or die is the lowest logical CPU id of the group, offline CPUs included. Unlike the
kernel's core_id and physical_package_id, these ids are unique on the machine.
"""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

CoreKind: TypeAlias = 'Literal["performance", "efficiency"]'
CacheType: TypeAlias = 'Literal["Unified", "Data", "Instruction"]'
Permission: TypeAlias = 'Literal["permitted", "denied", "unknown"]'
CalibrationKind: TypeAlias = 'Literal["products", "read bandwidth", "allocation", "parallel operation", "all-reduce"]'
LibraryKind: TypeAlias = 'Literal["allocator", "openmp", "mkl-dispatch"]'


@record
class LogicalCpu:
    """One online logical CPU and the groups it belongs to; None if unknown."""

    id: int
    core: int
    socket: int
    die: int | None = None
    l3: int | None = None
    numa_node: int | None = None
    kind: CoreKind | None = None


@record
class NumaNode:
    """One NUMA node: its online CPUs, its memory, and (id, distance) of every NUMA node, itself included.

    `initiators`: of a node without CPUs, the nodes whose CPUs reach its memory fastest; empty if unknown.
    """

    id: int
    cpus: frozenset[int]
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: tuple[tuple[int, int], ...] = ()
    initiators: frozenset[int] = frozenset()

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
    """Vendor, model and features of the CPU; `isa` holds normalized feature names (see FEATURES).

    On Arm `vendor` is the implementer's name as lscpu prints it ("ARM" for 0x41, "Ampere" for 0xc0, "NVIDIA" for
    0x4e) and `model` the part number (0xd0c is Neoverse N1). `platform` is the vendor of the machine in DMI
    ("Amazon EC2", "Google"); it distinguishes Graviton from Ampere Altra, which have the same core.
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

    @property
    def has_bf16(self) -> bool:
        """Whether the CPU has instructions for bf16 products."""
        return not self.isa.isdisjoint(BF16_FEATURES)

    @property
    def multiplies_bf16_faster(self) -> bool:
        """Whether products in bf16 are faster than in fp32.

        Intel's AVX512_BF16 does as many multiplications in a cycle as fp32 does, so that conversions make it slower;
        AMX, AMD's AVX512_BF16 and Arm's bf16 do more. Source: uops.info, VDPBF16PS; measured on Emerald Rapids without
        AMX (a virtual machine): products of 50 to 512 rows take 1.4 to 1.8 times as long as in fp32.
        """
        available = self.isa.intersection(BF16_FEATURES)
        return bool(available) and not (self.vendor == "GenuineIntel" and available == {"avx512_bf16"})


BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""CPU features for products in bf16; the last one is Arm's."""

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
"""Names of the features that are probed; `bf16`, `i8mm` and `fp16` are those of Arm."""


@record
class Quota:
    """The tightest CPU bandwidth limit among this process's cgroups, in CPUs, and its file."""

    cpus: float
    source: str

    @property
    def threads(self) -> int:
        """Threads that can run at a time: the CPUs rounded up, at least 1."""
        return max(1, -int(-self.cpus // 1))  # Not math.ceil: a launch would import math for this alone.


@record
class Budget:
    """The CPUs this process may use, and the number of threads that can run at a time."""

    cpus: frozenset[int]
    threads: int
    limited_by: str


@record
class Limits:
    """Limits of this process; `memory_nodes` are the NUMA nodes it may allocate on."""

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
    """Kernel settings that affect speed; None if the file is missing."""

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
    """A library on this machine that a worker can preload.

    `untrusted`: the file or directory that other users can write, so that it is not preloaded; None if there is none.
    """

    kind: LibraryKind
    name: str
    path: str
    untrusted: str | None = None


@record
class MigInstance:
    """One MIG device of an NVIDIA GPU: a compute instance inside a GPU instance.

    `uuid` ("MIG-…") is known to NVML only.
    """

    gpu_instance: int
    compute_instance: int
    uuid: str | None = None


@record
class Gpu:
    """One GPU as sysfs shows it, in PCI order.

    `device` is the PCI device id, the same for all GPUs of a model. `driver` is the bound kernel driver, if any.
    `accessible`: whether this process has the device files (a container may have some of them only).
    `tiles`: parts that Level Zero presents as separate devices (Intel).
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
"""Packages that settings require."""


@record
class Torch:
    """The torch of the worker's environment, read from its files (the launcher never imports torch).

    `extensions`: the installed packages of EXTENSIONS. `plugin`: whether torch will find cpulaunch's entry point.
    """

    version: str
    path: str
    bundled_openmp: str | None = None
    mkl_dispatch_symbol: bool = False
    extensions: tuple[str, ...] = ()
    plugin: bool = False

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version; None if the version is not numeric."""
        parts = self.version.split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts[:2]):
            return None
        return int(parts[0]), int(parts[1])


UNITS: dict[str, str] = {
    "products": "GFLOP/s",
    "read bandwidth": "GB/s",
    "allocation": "µs",
    "parallel operation": "µs",
    "all-reduce": "µs",
}
"""The unit of each kind; a higher rate and a shorter time are better."""


@record(kw_only=False)
class CalibrationFigure:
    """A figure: what was measured, with what ("bf16", "NUMA node 0", "tcmalloc", "intel", "gloo, 1 MiB")."""

    kind: str
    subject: str
    value: float

    @property
    def unit(self) -> str:
        return UNITS[self.kind]


@record
class Calibration:
    """The figures of a machine and a torch; `failures`: what could not be measured, and why.

    `disturbed`: other work ran meanwhile, so that no choice follows from the figures.
    """

    date: str
    figures: tuple[CalibrationFigure, ...] = ()
    failures: tuple[str, ...] = ()
    disturbed: bool = False

    def values(self, kind: CalibrationKind) -> dict[str, float]:
        """The figures of one kind that choices may follow, by their subjects."""
        if self.disturbed:
            return {}
        return {each.subject: each.value for each in self.figures if each.kind == kind}


@record
class Host:
    """All facts about a machine. `sysroot` is None for the machine of this process.

    `can_bind`: whether the operating system lets a process choose its CPUs (macOS does not). `torch_known`: whether
    the packages of the worker's Python were found, so that `torch` None means that it has none. `plugin_path`: the
    folder that makes cpulaunch's plugin known to a Python in which cpulaunch is not installed; None if none is needed.
    `calibration`: what this user measured here with this torch. `shm_free_bytes`: what is free of /dev/shm; None if
    there is no such folder, or it has no limit.
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
    shm_free_bytes: int | None = None
    libraries: tuple[Library, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    torch: Torch | None = None
    torch_known: bool = True
    plugin_path: str | None = None
    container: bool = False
    sysroot: str | None = None
    can_bind: bool = True
    calibration: Calibration | None = None

    @property
    def torch_release(self) -> tuple[int, int] | None:
        """Major and minor version of the worker's torch; None if there is no torch or its version is not numeric."""
        return None if self.torch is None else self.torch.release


@record
class Throttling:
    """Periods of a CPU quota, and those of them in which it held processes back."""

    periods: int = 0
    throttled: int = 0

    def since(self, before: Throttling) -> Throttling:
        """What was added after an earlier moment."""
        return Throttling(periods=self.periods - before.periods, throttled=self.throttled - before.throttled)


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
