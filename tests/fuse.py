"""A FUSE server of another user, that says of its files that root owns them: python fuse.py MOUNT_POINT FILE...

Each FILE is NAME=PATH: what is read is the content of PATH. It prints a line once it serves, and ends when unmounted.
Source: Linux, include/uapi/linux/fuse.h.
"""

import contextlib
import ctypes
import os
import stat
import struct
import sys

UID = 12345
ATTRIBUTES, ENTRY = struct.Struct("<QQQQQQIIIIIIIIII"), struct.Struct("<QQQQII")
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = (
    *(1, 2, 3, 14, 15, 18, 25),
    *(26, 27, 28, 29),
)
NO_ENTRY, NO_SUPPORT = 2, 38


def attributes(node: int, size: int) -> bytes:
    """A file of mode 0600, the first node a folder."""
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o600
    return ATTRIBUTES.pack(node, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int, body: bytes, names: list[bytes], contents: list[bytes]) -> bytes | int:
    """What the kernel gets for a request, or a number of an error."""
    if operation == INIT:
        return struct.pack("<IIIIHHII", 7, 31, 65536, 0, 12, 10, 65536, 1) + bytes(32)
    if operation == LOOKUP:
        name = body.rstrip(b"\0")
        if name not in names:
            return NO_ENTRY
        found = names.index(name) + 2
        return ENTRY.pack(found, 0, 1, 1, 0, 0) + attributes(found, len(contents[found - 2]))
    if operation == GETATTR:
        return struct.pack("<QII", 1, 0, 0) + attributes(node, 0 if node == 1 else len(contents[node - 2]))
    if operation in (OPEN, OPENDIR):
        return bytes(16)
    if operation in (READ, READDIR):
        _, at, size = struct.unpack("<QQI", body[:20])
        return contents[node - 2][at : at + size] if operation == READ else listing(names, at)
    return b"" if operation in (RELEASE, FLUSH, RELEASEDIR) else NO_SUPPORT


def listing(names: list[bytes], first: int) -> bytes:
    rows = b""
    for number, name in list(enumerate(names))[first:]:
        row = struct.pack("<QQII", number + 2, number + 1, len(name), 8) + name
        rows += row + bytes(-len(row) % 8)
    return rows


def main() -> None:
    """Effect: mounts as root, then serves as the other user."""
    point, *files = map(os.fsencode, sys.argv[1:])
    names, paths = zip(*(each.split(b"=", 1) for each in files), strict=True)
    contents = []
    for path in paths:
        with open(path, "rb") as file:
            contents.append(file.read())
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id={UID},group_id={UID},allow_other,default_permissions".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"strangers", point, b"fuse", 6, options):
        raise SystemExit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    os.setgid(UID)
    os.setuid(UID)
    print("serving", flush=True)
    while True:
        try:
            request = os.read(fd, 1 << 17)
        except OSError:
            return
        _, operation, unique, node, *_ = struct.unpack("<IIQQIIII", request[:40])
        if operation == FORGET:
            continue
        said = answer(operation, node, request[40:], list(names), contents)
        data, error = (b"", -said) if isinstance(said, int) else (said, 0)
        with contextlib.suppress(FileNotFoundError):  # The process that asked has ended.
            os.write(fd, struct.pack("<IiQ", 16 + len(data), error, unique) + data)


if __name__ == "__main__":
    main()
