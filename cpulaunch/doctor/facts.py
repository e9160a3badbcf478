"""Facts that only doctor needs: shared memory, swap, OpenMP runtimes in packages, and what torch reports of itself.

Facts in files are read through the root, as all of `probe` does; others come from this machine and are None for a
captured one.
"""

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import cpulaunch
from cpulaunch.doctor.torch_report import BrokenTorch, Runner, TorchFacts, read_oneccl_problem, read_torch_report
from cpulaunch.probe import Root
from cpulaunch.probe.contradictions import read_contradictions
from cpulaunch.probe.gpus.nvml import with_nvml
from cpulaunch.probe.portable import read_cpuid_features
from cpulaunch.probe.software.oneccl import oneccl_version
from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.records.host import Host
from cpulaunch.records.request import WorkerPython
from cpulaunch.system.files.trust import untrusted_content, untrusted_part
from cpulaunch.system.root import natural

OPENMP_FILES = ("libgomp", "libiomp5", "libomp")
SHM = "dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Size and free space of /dev/shm."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Size of the swap space and what is free of it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All input of the checks.

    `live`: whether the facts are about this machine and not a captured one. `torch`: None if it is not installed.
    `bundled_openmp`: (folder of a package, OpenMP runtime in it). `oneccl`: the version installed beside torch.
    `oneccl_problem`: why it cannot be loaded; empty if it can. `is_linux`: whether this machine runs Linux.
    `missing_library_reason`: why cpulaunch's library of collectives is not used; empty if
    it is. `cpuid_features`: those of FEATURES (records/host.py) that the processor reports by CPUID; None for a
    captured machine. `contradictions`: clauses on kernel files that contradict one another. `untrusted_code`: what
    other users can change on the paths of Python, torch and cpulaunch, and in the latter two. `python`: the Python
    that runs workers; None for a captured machine.
    """

    host: Host
    environ: Mapping[str, str]
    live: bool
    shm: SharedMemory | None
    swap: Swap | None
    torch: TorchFacts | BrokenTorch | None
    bundled_openmp: tuple[tuple[str, str], ...] = ()
    distribution: str = ""
    oneccl: str | None = None
    oneccl_problem: str = ""
    is_linux: bool = True
    missing_library_reason: str = ""
    cpuid_features: frozenset[str] | None = None
    contradictions: tuple[str, ...] = ()
    untrusted_code: tuple[str, ...] = ()
    python: WorkerPython | None = None


def gather_facts(host: Host, *, root: Root, python: WorkerPython, environ: Mapping[str, str], run: Runner) -> Facts:
    """All facts; for a captured machine those in its files. Effect: on this machine runs torch, NVML and CPUID."""
    oneccl = None if host.torch is None else oneccl_version(root, host.torch)
    return Facts(
        host=with_nvml(host),
        environ=environ if root.live else {},
        live=root.live,
        shm=read_shm() if root.live else None,
        swap=read_swap(root),
        torch=read_torch_report(python.path, environ, run=run) if root.live else None,
        bundled_openmp=read_bundled_openmp(root, host),
        distribution=read_distribution(root),
        oneccl=oneccl,
        oneccl_problem=read_oneccl_problem(python.path, environ, run=run) if root.live and oneccl else "",
        is_linux=platform.system() == "Linux",
        missing_library_reason=missing_library_reason(own_file(MEMORY_LIBRARY)) if root.live else "",
        cpuid_features=read_cpuid_features() if root.live else None,
        contradictions=read_contradictions(root, host),
        untrusted_code=read_untrusted_code(host, python.path) if root.live else (),
        python=python if root.live else None,
    )


def read_untrusted_code(host: Host, interpreter: str) -> tuple[str, ...]:
    """What other users can change of Python, torch and cpulaunch, each with the reason.

    That is a part of the path to the interpreter or to a package, or else a file or folder in the package.
    """
    packages = [os.path.dirname(cpulaunch.__file__), *([] if host.torch is None else [host.torch.path])]
    found = [untrusted_part(interpreter)] if os.path.isabs(interpreter) else []
    found += [untrusted_part(path) or untrusted_content(path) for path in packages if os.path.isabs(path)]
    return tuple(dict.fromkeys(reason for reason in found if reason is not None))


def read_shm() -> SharedMemory | None:
    """Size and free space of /dev/shm; None if it does not exist. Source: statvfs(3)."""
    try:
        status = os.statvfs("/" + SHM)
    except (OSError, AttributeError):
        return None
    return SharedMemory(total_bytes=status.f_blocks * status.f_frsize, free_bytes=status.f_bavail * status.f_frsize)


def own_file(name: str) -> str:
    """The path of a file in the package."""
    return os.path.join(os.path.dirname(cpulaunch.__file__), name)


def missing_library_reason(path: str) -> str:
    """Why the compiled library of collectives is not used on one host; empty if it is used."""
    if not os.path.isfile(path):
        return "cpulaunch was installed without a C compiler"
    try:
        version = ctypes.CDLL(path).cpulaunch_ccl_version()
    except (OSError, AttributeError) as error:
        return f"cpulaunch's library cannot be loaded: {error}"
    return "" if version == MEMORY_LIBRARY_VERSION else f"{path} belongs to another version of cpulaunch"


def read_swap(root: Root) -> Swap | None:
    """Size and free swap space, from proc/meminfo (kB); None if it has no such lines."""
    sizes: dict[str, int] = {}
    for line in (root.text("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        kilobytes = natural(words[0]) if words else None
        if kilobytes is not None:
            sizes[name] = kilobytes * 1024
    if "SwapTotal" not in sizes:
        return None
    return Swap(total_bytes=sizes["SwapTotal"], free_bytes=sizes.get("SwapFree", 0))


def read_bundled_openmp(root: Root, host: Host) -> tuple[tuple[str, str], ...]:
    """(package folder, file) of each OpenMP runtime that a wheel beside torch bundles in its `….libs` folder."""
    if host.torch is None:
        return ()
    packages = os.path.dirname(host.torch.path)
    folders = sorted(name for name in root.names(packages) if name.endswith(".libs"))
    return tuple(
        (folder, f"{packages}/{folder}/{name}")
        for folder in folders
        for name in sorted(root.names(f"{packages}/{folder}"))
        if name.startswith(OPENMP_FILES) and ".so" in name and folder != "torch.libs"
    )


def read_distribution(root: Root) -> str:
    """The distribution's id and those it is like ("ubuntu debian"). Source: os-release(5)."""
    values: dict[str, str] = {}
    for line in (root.text("etc/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        values[name] = value.strip("\"'")
    return f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".strip()
