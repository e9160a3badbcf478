"""ELF files, a few bytes of them: what machine they are for, what they export, and where they look for others.

Source: System V ABI (gABI) chapters 4 and 5; GNU hash sections as glibc reads them.
"""

from __future__ import annotations

import os
import struct
from itertools import takewhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    from cpulaunch.system.root import Root

    Found = TypeVar("Found")
    Default = TypeVar("Default")

MACHINES = {
    "x86_64": (2, 1, 62),
    "i686": (1, 1, 3),
    "i386": (1, 1, 3),
    "aarch64": (2, 1, 183),
    "armv7l": (1, 1, 40),
    "ppc64": (2, 2, 21),
    "ppc64le": (2, 1, 21),
    "s390x": (2, 2, 22),
    "riscv64": (2, 1, 243),
    "loongarch64": (2, 1, 258),
}
"""By `uname -m`: ELF class (1: 32 bits, 2: 64), order of bytes (1: little-endian, 2: big-endian), e_machine."""

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_RPATH, DT_RUNPATH, DT_GNU_HASH = 1, 5, 6, 15, 29, 0x6FFFFEF5
DT_NULL, DT_AUXILIARY, DT_FILTER = 0, 0x7FFFFFFD, 0x7FFFFFFF
NAME_BYTES = 1 << 12
"""Of the name of a library, which is a path where it has a slash."""
SYMBOL_BYTES = 24
CHAIN_WORDS = 64
TABLE_BYTES = 1 << 16
"""Segment and dynamic tables of real libraries have a few hundred bytes; a damaged header may claim any size."""


def fits(header: bytes | None, arch: str) -> bool:
    """Whether the first 20 bytes are those of an ELF file for `arch` (any ELF file, if the arch is not known)."""
    if header is None or len(header) < 20 or header[:4] != b"\x7fELF":
        return False
    machine: int = struct.unpack_from("<H" if header[5] == 1 else ">H", header, 18)[0]
    found = (header[4], header[5], machine)
    return MACHINES.get(arch, found) == found


def exports(root: Root, name: str, symbol: str) -> bool:
    """Whether a 64-bit little-endian shared library defines `symbol`; False for any other file.

    Reads a few pages, however large the library is.
    """
    return _read(root, name, lambda file: _exports(file, symbol.encode()), default=False)


def needed_from(root: Root, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Where the loader looks for what a library needs, and the names of what it needs, as written.

    These are the entries of DT_RPATH and DT_RUNPATH, and of DT_NEEDED, DT_AUXILIARY and DT_FILTER. None if they cannot
    be read, as of what is no 64-bit little-endian shared library.
    """
    return _read(root, name, _needed_from, default=None)


def _read(root: Root, name: str, look: Callable[[int], Found], *, default: Default) -> Found | Default:
    """What is found in the opened file; the default if it cannot be read."""
    try:
        descriptor = root.open(name)
    except (OSError, ValueError):
        return default
    try:
        return look(descriptor)
    except (struct.error, LookupError, ArithmeticError, ValueError, OSError):
        return default
    finally:
        os.close(descriptor)


def _needed_from(file: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    segments, table = _tables(file)
    strings_at = _offset(segments, dict(table)[DT_STRTAB])

    def texts(*tags: int, size: int) -> list[str]:
        found = (os.pread(file, size, strings_at + value).partition(b"\0")[0] for tag, value in table if tag in tags)
        return [os.fsdecode(text) for text in found if text]

    folders = tuple(entry for text in texts(DT_RPATH, DT_RUNPATH, size=TABLE_BYTES) for entry in text.split(":"))
    return folders, tuple(texts(DT_NEEDED, DT_AUXILIARY, DT_FILTER, size=NAME_BYTES))


def _tables(file: int) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
    """The segments and the dynamic table. Raises: ValueError for another kind of file."""
    header = os.pread(file, 64, 0)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ValueError(header)
    segments = list(_segments(file, header))
    return segments, _dynamic(file, segments)


def _exports(file: int, symbol: bytes) -> bool:
    segments, entries = _tables(file)
    table = dict(entries)
    hash_at, symbols_at, strings_at = (_offset(segments, table[tag]) for tag in (DT_GNU_HASH, DT_SYMTAB, DT_STRTAB))
    return any(
        _defines(file, symbols_at + index * SYMBOL_BYTES, strings_at=strings_at, symbol=symbol)
        for index in _candidates(file, hash_at, _gnu_hash(symbol))
    )


def _segments(file: int, header: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(type, file offset, address, bytes in the file) of each segment."""
    (start,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    table = os.pread(file, min(size * count, TABLE_BYTES), start)
    for at in range(0, size * count, size):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", table, at)
        yield kind, offset, address, length


def _dynamic(file: int, segments: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """(tag, value) of each entry before the one that ends the table."""
    places = {kind: (offset, length) for kind, offset, _, length in segments}
    offset, length = places[PT_DYNAMIC]
    data = os.pread(file, min(length, TABLE_BYTES), offset)
    entries = struct.iter_unpack("<QQ", data[: len(data) // 16 * 16])
    return list(takewhile(lambda entry: entry[0] != DT_NULL, entries))


def _offset(segments: list[tuple[int, int, int, int]], address: int) -> int:
    for kind, offset, start, length in segments:
        if kind == PT_LOAD and start <= address < start + length:
            return offset + address - start
    raise ValueError(address)


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def _candidates(file: int, at: int, wanted: int) -> Iterator[int]:
    """Indices of the symbols whose hash is `wanted` (its lowest bit marks the end of a chain)."""
    buckets, first, bloom_words, shift = struct.unpack("<IIII", os.pread(file, 16, at))
    (bloom,) = struct.unpack("<Q", os.pread(file, 8, at + 16 + wanted // 64 % bloom_words * 8))
    if not (bloom >> wanted % 64 & bloom >> (wanted >> shift) % 64 & 1):
        return
    buckets_at = at + 16 + bloom_words * 8
    chains_at = buckets_at + buckets * 4
    (index,) = struct.unpack("<I", os.pread(file, 4, buckets_at + wanted % buckets * 4))
    if index < first:
        return
    chain = os.pread(file, CHAIN_WORDS * 4, chains_at + (index - first) * 4)
    for (value,) in struct.iter_unpack("<I", chain):
        if value | 1 == wanted | 1:
            yield index
        if value & 1:
            return
        index += 1


def _defines(file: int, at: int, *, strings_at: int, symbol: bytes) -> bool:
    name, _, section = struct.unpack_from("<IHH", os.pread(file, 8, at))
    return section != 0 and os.pread(file, len(symbol) + 1, strings_at + name) == symbol + b"\0"
