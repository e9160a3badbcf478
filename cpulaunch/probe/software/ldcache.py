"""The dynamic loader's cache: which path each library name is found at.

Source: glibc, sysdeps/generic/dl-cache.h ("glibc-ld.so.cache1.1"; an older cache may come first).
"""

import struct

from cpulaunch.system.root import Root

CACHE = "etc/ld.so.cache"
MAGIC = b"glibc-ld.so.cache1.1"
HEADER_BYTES = 48
ENTRY = struct.Struct("=iIIIQ")


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
    return [
        _string(data, start + value)
        for _, key, value, _, _ in entries
        if data.startswith(wanted, start + key) and start + value < len(data)
    ]


def _string(data: bytes, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode(errors="surrogateescape")
