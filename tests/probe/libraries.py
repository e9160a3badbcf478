"""Synthetic libraries: ELF headers and a loader cache."""

import struct
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}


def elf_header(machine: int = 62, *, elf_class: int = 2, order: str = "<") -> bytes:
    """The first 20 bytes of a shared library."""
    return b"\x7fELF" + bytes([elf_class, " <>".index(order), 1]) + bytes(9) + struct.pack(f"{order}HH", 3, machine)


def library(root: Path, name: str, *, machine: int = 62) -> Path:
    file = root / name.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(elf_header(machine))
    return file


def ld_cache(entries: list[tuple[str, str]], *, old_format_first: bool = False) -> bytes:
    """Content of /etc/ld.so.cache in glibc's format; `entries` are (name, path)."""
    prefix = b"ld.so-1.7.0\0" + struct.pack("=I", 0) if old_format_first else b""
    strings = b""
    start = 48 + 24 * len(entries)
    table = b""
    for name, path in entries:
        key = start + len(strings)
        strings += name.encode() + b"\0"
        value = start + len(strings)
        strings += path.encode() + b"\0"
        table += struct.pack("=iIIIQ", 0x0303, key, value, 0, 0)
    header = b"glibc-ld.so.cache1.1" + struct.pack("=II", len(entries), len(strings)) + bytes(20)
    return prefix + header + table + strings
