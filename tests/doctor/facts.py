"""Machines and facts that the tests of the checks start from."""

from dataclasses import replace
from typing import Any

from cpulaunch.doctor.facts import Facts, SharedMemory, Swap
from cpulaunch.doctor.torch_report import TorchFacts
from cpulaunch.records.host import (
    Budget,
    CpuInfo,
    Gpu,
    Host,
    Kernel,
    Library,
    Limits,
    LogicalCpu,
    NumaNode,
    Quota,
    Torch,
)
from cpulaunch.records.request import WorkerPython

MIB, GIB = 1 << 20, 1 << 30
TORCH = TorchFacts(
    version="2.13.0+cpu",
    mkl=True,
    onednn=True,
    openmp=True,
    capability="AVX512",
    threads=4,
    openmp_files=("/env/torch/lib/libgomp.so.1",),
)

PLUGIN = Torch(version="2.13.0+cpu", path="/env/site-packages/torch", plugin=True)


def library(kind: Any, name: str, path: str = "/usr/lib/libx.so", untrusted: str | None = None) -> Library:
    """A library found by the probe."""
    return Library(kind=kind, name=name, path=path, untrusted=untrusted)


def gpu(index: int, **more: Any) -> Gpu:
    """An NVIDIA GPU with a driver."""
    return replace(Gpu(index=index, vendor="nvidia", pci=f"0000:{index:02x}:00.0", driver="nvidia"), **more)


BEST = (library("allocator", "tcmalloc", "/usr/lib/libtcmalloc.so.4"), library("openmp", "intel", "/env/libiomp5.so"))


def machine(
    *,
    cores: int = 4,
    smt: int = 1,
    nodes: int = 1,
    allowed: frozenset[int] | None = None,
    quota: float | None = None,
    **more: Any,
) -> Host:
    """An x86 host with Linux numbering of SMT siblings and its cores split evenly between NUMA nodes."""
    cpus = tuple(
        LogicalCpu(id=core + thread * cores, core=core, socket=0, numa_node=core * nodes // cores)
        for thread in range(smt)
        for core in range(cores)
    )
    usable = frozenset(cpu.id for cpu in cpus) if allowed is None else allowed
    threads = len(usable) if quota is None else max(1, round(quota + 0.5))
    host = Host(
        arch="x86_64",
        cpu=CpuInfo(vendor="GenuineIntel", family=6, model=0x8F, isa=frozenset({"avx2", "amx_tile"})),
        cpus=cpus,
        limits=Limits(
            affinity=usable,
            quota=None if quota is None else Quota(cpus=quota, source="sys/fs/cgroup/cpu.max"),
            budget=Budget(cpus=usable, threads=threads, limited_by="affinity"),
        ),
        numa_nodes=tuple(
            NumaNode(id=node, cpus=frozenset(cpu.id for cpu in cpus if cpu.numa_node == node)) for node in range(nodes)
        ),
        kernel=Kernel(transparent_hugepage="madvise", numa_balancing=False, governor="performance"),
        libraries=BEST,
        torch=PLUGIN,
    )
    return replace(host, **more)


def kernel(**settings: Any) -> Kernel:
    """Recommended kernel settings, changed by `settings`."""
    return replace(Kernel(transparent_hugepage="madvise", numa_balancing=False, governor="performance"), **settings)


def facts(host: Host | None = None, **more: Any) -> Facts:
    """Facts of a machine without problems, changed by `more`."""
    sound = Facts(
        host=host or machine(),
        environ={},
        live=True,
        shm=SharedMemory(total_bytes=8 * GIB, free_bytes=8 * GIB),
        swap=Swap(total_bytes=0, free_bytes=0),
        torch=TORCH,
        distribution="debian",
        oneccl="2022.1.2",
        cpuid_features=frozenset({"avx2"}),
        python=WorkerPython(path="/env/bin/python", origin="default", reason="cpulaunch's own environment"),
    )
    return replace(sound, **more)
