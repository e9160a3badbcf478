"""Facts about a live process: the CPUs of its threads, the NUMA nodes of its memory, the libraries it has loaded.

Read from /proc/PID alone, so that a process can take a snapshot of itself or of any process of the same user.
Source: proc(5), numa(7); Linux, Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import os

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.system.files.reading import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

OPENMP = {"libgomp": "gnu", "libiomp5": "intel", "libomp": "llvm", "libomp5": "llvm"}
"""File names of OpenMP runtimes before "-" or ".so", and whose they are: wheels bundle them as libgomp-HASH.so.1."""

ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
COMMAND_LETTERS = 1000
MAX_COMMAND = 1 << 16
"""Bytes read of a command line. It may be gigabytes: a process decides where its own lies (prctl, PR_SET_MM)."""
MAX_BYTES = 1 << 23
"""Bytes read of any other file: enough for the maps of a process with 65,530 mappings, the usual limit of Linux,
most of them anonymous."""
MAX_THREADS = 4096
"""Looked at of a process: tens of thousands take seconds."""
MAX_OPENMP = 8
"""Paths told of OpenMP runtimes: a process may have mapped any number of files with such names."""


def snapshot(pid: int | None = None, *, proc: str = "/proc", pages: bool = True) -> dict[str, Any]:
    """Facts about a process (None: this one); empty, zero or None where /proc has none or the process has ended.

    Shape: {"pid", "command", "threads": [{"cpus": "0-1", "count": 3}], most first, "pages": {"0": bytes of each NUMA
    node}, "openmp": [paths], "openmp_runtime" and "openmp_path": of the only one,
    "allocator": name, "allocator_path", "peak_memory_bytes", "rss_bytes"}.
    `pages` walks the page tables of the process: milliseconds for each GB, during which the process may be delayed.
    """
    number = os.getpid() if pid is None else pid
    folder = f"{proc}/{number}"
    status = _status(f"{folder}/status")
    loaded = loaded_files(_lines(f"{folder}/maps"))
    openmp = [file for file in loaded if openmp_kind(file)][:MAX_OPENMP]
    allocator, path = _allocator(loaded)
    return {
        "pid": number,
        "command": " ".join(_read(f"{folder}/cmdline", MAX_COMMAND).replace("\0", " ").split())[:COMMAND_LETTERS],
        "threads": thread_masks(_masks(f"{folder}/task")),
        "pages": page_placement(_lines(f"{folder}/numa_maps")) if pages else {},
        "openmp": openmp,
        **openmp_facts(openmp[0] if len(openmp) == 1 else None),
        "allocator": allocator,
        "allocator_path": path,
        "peak_memory_bytes": _bytes(status.get("VmHWM")),
        "rss_bytes": _bytes(status.get("VmRSS")),
    }


def thread_masks(masks: Iterable[str]) -> list[dict[str, Any]]:
    """How many threads have each mask, the most frequent first."""
    counts: dict[str, int] = {}
    for mask in masks:
        counts[mask] = counts.get(mask, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], min(parse_cpulist(item[0]), default=0), item[0]))
    return [{"cpus": mask, "count": count} for mask, count in ordered]


def page_placement(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of a process on each NUMA node, from its numa_maps, without those of shared libraries.

    Which node these are on was decided by the process that first read them; each core caches what it runs of them.
    Source: numa(7): "N0=PAGES" counts pages of the mapping's own size, kernelpagesize_kB (since Linux 3.2).
    """
    placed: dict[int, int] = {}
    for line in lines:
        words = dict(word.partition("=")[::2] for word in line.split(" ")[2:])
        if _is_library(words.get("file", "")):
            continue
        size = _number(words.get("kernelpagesize_kB")) * 1024
        for name, count in words.items():
            if name.startswith("N") and name[1:].isascii() and name[1:].isdigit():
                node = int(name[1:])
                placed[node] = placed.get(node, 0) + _number(count) * size
    return {str(node): placed[node] for node in sorted(placed)}


def _is_library(path: str) -> bool:
    """Whether a file is a shared library by its name: libx.so, libx.so.6."""
    return path.endswith(".so") or ".so." in path.rpartition("/")[2]


def loaded_files(lines: Iterable[str]) -> list[str]:
    """The files of a process's executable mappings, from its maps: "START-END PERMS OFFSET DEV INODE PATH"."""
    files: dict[str, None] = {}
    for line in lines:
        parts = line.split(None, 5)
        if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/"):
            files[parts[5].removesuffix(" (deleted)")] = None
    return list(files)


def openmp_kind(path: str) -> str | None:
    """Whose OpenMP runtime a library is: "gnu", "intel" or "llvm"; None for any other library."""
    return OPENMP.get(_stem(path))


def openmp_facts(path: str | None) -> dict[str, str | None]:
    """What a snapshot says about the runtime that is in use; None if it is not known."""
    return {"openmp_runtime": None if path is None else openmp_kind(path), "openmp_path": path}


def _stem(path: str) -> str:
    """A shared library's name without version and hash; empty for other files."""
    name, is_library, _ = path.rpartition("/")[2].partition(".so")
    return name.partition("-")[0] if is_library else ""


def _allocator(loaded: Iterable[str]) -> tuple[str, str | None]:
    """Name and path of the memory allocator; ("default", None) if it is none of ALLOCATORS."""
    for path in loaded:
        for name in ALLOCATORS:
            if _stem(path).startswith(f"lib{name}"):
                return name, path
    return "default", None


def _masks(folder: str) -> Iterator[str]:
    try:
        threads = os.listdir(folder)
    except OSError:
        return
    for thread in threads[:MAX_THREADS]:
        status = _status(f"{folder}/{thread}/status")
        if mask := status.get("Cpus_allowed_list"):
            yield mask


def _status(path: str) -> dict[str, str]:
    """The fields of a status file."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in _lines(path))}


def _bytes(text: str | None) -> int | None:
    """Bytes of a field such as "2116 kB"; None if the field is absent, as for a process that has ended."""
    return _number(text.split()[0]) * 1024 if text else None


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _lines(path: str) -> list[str]:
    """The lines of a file, which end at "\\n" alone: a name in it may hold what else Python takes for an end."""
    return _read(path, MAX_BYTES).split("\n")


def _read(path: str, max_bytes: int) -> str:
    """The text at the start of a file; empty if it is absent, may not be read, or its process ends (ESRCH)."""
    try:
        return read_proc(path, max_bytes=max_bytes).decode(errors="replace")
    except OSError:
        return ""
