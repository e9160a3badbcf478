"""What doctor looks at beyond the Host: shared memory, swap, other packages' OpenMP runtimes, torch's own words."""

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import cpulaunch
from cpulaunch.doctor.torch_report import BrokenTorch, Runner, TorchFacts, ask_torch
from cpulaunch.probe import Root
from cpulaunch.probe.gpus.nvml import with_nvml
from cpulaunch.probe.software.oneccl import oneccl_version
from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY, MEMORY_LIBRARY_VERSION
from cpulaunch.records.host import Host

OPENMP_FILES = ("libgomp", "libiomp5", "libomp")
SHM = "dev/shm"
YAMA = "proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Size of /dev/shm and what is free of it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Swap space of the machine and what is free of it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the checks judge. `live`: this machine, not a captured one; `torch` None: not installed.

    `bundled_openmp`: OpenMP runtimes that packages bring along, by the package's folder. `oneccl`: the version beside
    torch, if any. `may_copy`: whether system calls that copy between processes are allowed (None: there are none),
    `ptrace_scope`: to whom, where the kernel has Yama; `no_library`: why cpulaunch's own for collectives is not
    used, empty if it is.
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
    may_copy: bool | None = None
    ptrace_scope: int | None = None
    no_library: str = ""


def gather_facts(host: Host, *, root: Root, interpreter: str, environ: Mapping[str, str], run: Runner) -> Facts:
    """All facts. Of a captured machine, nothing of this process or machine. Effect: asks torch and NVML here."""
    return Facts(
        host=with_nvml(host),
        environ=environ if root.live else {},
        live=root.live,
        shm=read_shm() if root.live else None,
        swap=read_swap(root),
        torch=ask_torch(interpreter, environ, run=run) if root.live else None,
        bundled_openmp=read_bundled_openmp(root, host),
        distribution=read_distribution(root),
        oneccl=None if host.torch is None else oneccl_version(root, host.torch),
        may_copy=may_copy() if root.live else None,
        ptrace_scope=read_ptrace_scope(root),
        no_library=no_library(own_file(MEMORY_LIBRARY)) if root.live else "",
    )


def read_shm() -> SharedMemory | None:
    """The /dev/shm of this machine; None where there is none. Source: statvfs(3)."""
    try:
        status = os.statvfs("/" + SHM)
    except (OSError, AttributeError):
        return None
    return SharedMemory(total_bytes=status.f_blocks * status.f_frsize, free_bytes=status.f_bavail * status.f_frsize)


def read_ptrace_scope(root: Root) -> int | None:
    """Who may read another process's memory, 0 (its user) to 3 (nobody); None without Yama. Source: LSM/Yama.rst."""
    text = (root.text(YAMA) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def may_copy() -> bool | None:
    """Whether this process may copy between processes at all; None where there is no such call.

    It copies from itself, which only a filter of system calls (a container's) forbids. Source: process_vm_readv(2).
    """
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None)
    source, target = ctypes.c_char(b"x"), ctypes.c_char(b"-")
    there, here = (_Piece(ctypes.addressof(each), 1) for each in (source, target))
    size = ctypes.c_ulong(1)
    copied = libc.process_vm_readv(os.getpid(), ctypes.byref(here), size, ctypes.byref(there), size, ctypes.c_ulong(0))
    return bool(copied == 1)


def own_file(name: str) -> str:
    """The path of a file of cpulaunch's."""
    return os.path.join(os.path.dirname(cpulaunch.__file__), name)


def no_library(path: str) -> str:
    """Why the compiled library of collectives on one host is not used; empty if it is."""
    if not os.path.isfile(path):
        return "cpulaunch was installed without a C compiler"
    try:
        version = ctypes.CDLL(path).cpulaunch_ccl_version()
    except (OSError, AttributeError) as error:
        return f"cpulaunch's library cannot be loaded: {error}"
    return "" if version == MEMORY_LIBRARY_VERSION else f"{path} is another version's"


def read_swap(root: Root) -> Swap | None:
    """Swap space, from proc/meminfo (kB); None where it does not say."""
    sizes: dict[str, int] = {}
    for line in (root.text("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    if "SwapTotal" not in sizes:
        return None
    return Swap(total_bytes=sizes["SwapTotal"], free_bytes=sizes.get("SwapFree", 0))


def read_bundled_openmp(root: Root, host: Host) -> tuple[tuple[str, str], ...]:
    """(package folder, file) of each OpenMP runtime that a wheel beside torch brings in its `….libs` folder."""
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
