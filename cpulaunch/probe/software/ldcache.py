"""The dynamic loader's cache: which path each library name is found at.

Source: glibc, sysdeps/generic/dl-cache.h ("glibc-ld.so.cache1.1"; an older cache may come first).
"""

import struct
from itertools import islice

from cpulaunch.system.root import MAX_PATH, Root

CACHE = "etc/ld.so.cache"
MAGIC = b"glibc-ld.so.cache1.1"
HEADER_BYTES = 48
ENTRY = struct.Struct("=iIIIQ")
MAX_FOUND = 1000
"""Paths that are read: a cache has a few of each name."""


def read_ld_cache(root: Root, prefixes: tuple[str, ...]) -> list[str]:
    """The paths of the cached libraries whose names start with one of `prefixes`, in the cache's order.

    Empty if there is no cache or it is not of the known format: a cache is a convenience.
    """
    data = root.bytes(CACHE) or b""
    start = data.find(MAGIC)
    if start < 0 or len(data) < start + HEADER_BYTES:
        return []
    (count,) = struct.unpack_from("=I", data, start + len(MAGIC))
    end = start + HEADER_BYTES + count * ENTRY.size
    if end > len(data):
        return []
    wanted = tuple(prefix.encode() for prefix in prefixes)
    entries = ENTRY.iter_unpack(data[start + HEADER_BYTES : end])
    found = (
        _string(data, start + value)
        for _, key, value, _, _ in entries
        if data.startswith(wanted, start + key) and start + value < len(data)
    )
    return list(islice(filter(None, found), MAX_FOUND))


def _string(data: bytes, at: int) -> str:
    """The path at a position; empty if it is longer than a path can be."""
    end = data.find(b"\0", at, at + MAX_PATH)
    return "" if end < 0 else data[at:end].decode(errors="surrogateescape")
