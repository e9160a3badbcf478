"""All facts of a machine in one object: at detail `launch` those that planning needs, at `full` all of them."""

from __future__ import annotations

import os
import sys
from types import MappingProxyType

from cpulaunch.probe.caches import join_split_l3, read_caches, read_l3
from cpulaunch.probe.cgroups import read_cgroups
from cpulaunch.probe.isa import read_arch, read_cpu_info
from cpulaunch.probe.kernel import read_kernel
from cpulaunch.probe.limits import read_limits
from cpulaunch.probe.numa import read_memory, read_numa_nodes
from cpulaunch.probe.software.libraries import mkl_dispatch_library, read_libraries
from cpulaunch.probe.software.torch_files import environment_prefix, is_torch_known, read_torch
from cpulaunch.probe.topology import read_cpu_ids, read_cpus, read_kinds
from cpulaunch.records.host import CpuInfo, Gpu, Host, Library
from cpulaunch.records.record import replace
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

Detail: TypeAlias = 'Literal["launch", "full"]'
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
CONTAINER_FILES = (".dockerenv", "run/.containerenv")
GPU_DRIVERS = ("nvidia", "amdgpu", "xe", "i915")
"""Looking these up takes microseconds; listing the PCI devices of a server takes milliseconds."""


def probe_host(
    root: Root,
    *,
    interpreter: str | None = None,
    environ: Mapping[str, str] = NO_ENVIRONMENT,
    detail: Detail = "full",
) -> Host:
    """The machine under `root`, as seen by a program of `interpreter` started with `environ`.

    `launch` leaves out L1 and L2 caches, GPUs without a driver, and, on one NUMA node, whether memory policies are
    permitted.
    Raises: ProbeError naming the first file that exists and does not parse.
    """
    if root.live and not sys.platform.startswith("linux"):
        from cpulaunch.probe.portable import probe_portable

        return probe_portable()
    full = detail == "full"
    ids = read_cpu_ids(root)
    nodes = read_numa_nodes(root, ids)
    caches, l3 = read_caches(root, ids) if full else read_l3(root, ids)
    cpu = read_cpu_info(root)
    cpus = read_cpus(root, ids, nodes=nodes, l3=l3, kinds=read_kinds(root, ids, cpu))
    caches, cpus = join_split_l3(caches, cpus)
    arch = os.uname().machine if root.live else read_arch(root)
    cgroups = read_cgroups(root)
    prefix = environment_prefix(root, interpreter)
    torch = read_torch(root, interpreter, prefix, environ)
    return Host(
        arch=arch,
        cpu=_with_frequencies(cpu) if full and root.live else cpu,
        cpus=cpus,
        limits=read_limits(root, ids.online, cgroups),
        offline_cpus=ids.offline,
        numa_nodes=nodes,
        caches=caches,
        kernel=read_kernel(root, first_cpu=min(ids.online), try_mempolicy=full or len(nodes) > 1),
        memory_bytes=read_memory(root),
        shm_free_bytes=read_free_space("/dev/shm") if root.live else None,
        libraries=_libraries(root, arch, prefix=prefix, environ=environ),
        gpus=_gpus(root, all_of_them=full),
        torch=torch,
        torch_known=torch is not None or is_torch_known(root, interpreter, prefix, environ),
        container=cgroups.container or any(root.exists(name) for name in CONTAINER_FILES),
        sysroot=None if root.live else root.path,
    )


def _with_frequencies(cpu: CpuInfo) -> CpuInfo:
    from cpulaunch.probe.portable import read_frequencies

    current, maximum = read_frequencies()
    return replace(cpu, current_mhz=current, max_mhz=maximum)


def read_free_space(folder: str) -> int | None:
    """Bytes that this user can still write there; None if there is no such folder, or no limit (tmpfs, size=0)."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _libraries(root: Root, arch: str, *, prefix: str | None, environ: Mapping[str, str]) -> tuple[Library, ...]:
    own = mkl_dispatch_library() if root.live else ()
    return read_libraries(root, arch, prefix=prefix, environ=environ) + own


def _gpus(root: Root, *, all_of_them: bool) -> tuple[Gpu, ...]:
    if not all_of_them and not any(root.exists(f"sys/bus/pci/drivers/{name}") for name in GPU_DRIVERS):
        return ()
    from cpulaunch.probe.gpus.sysfs import read_gpus

    return read_gpus(root)
