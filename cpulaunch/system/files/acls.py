"""Access control lists: whom they let write, beyond what owner and mode say, and copies of them."""

from __future__ import annotations

import errno
import os

from cpulaunch.system.files.mounts import is_own_name
from cpulaunch.system.files.owners import is_ambiguous, is_unmapped
from cpulaunch.system.files.reading import read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ACL = "system.posix_acl_access"
ACL_VERSION = 2
ACL_HEADER_BYTES, ACL_ENTRY_BYTES = 4, 8
ACL_USER, ACL_GROUP_OWNER, ACL_GROUP, ACL_MASK = 0x02, 0x04, 0x08, 0x10
"""An ACL is a version (32 bits) and entries of a tag (16 bits), permissions (16) and an id (32), little-endian.

Source: Linux, include/uapi/linux/posix_acl.h and posix_acl_xattr.h."""
WRITE = 2
MAX_DIGITS = 10
ABSENT = tuple(getattr(errno, name) for name in ("ENODATA", "ENOATTR", "EOPNOTSUPP") if hasattr(errno, name))

NFS4_ALLOWS, NFS4_FOR_CHILDREN, NFS4_OF_GROUP = 0, 0x08, 0x40
NFS4_RULES = 0x40000 | 0x80000
NFS4_WRITES = 0x02 | 0x04 | 0x40 | NFS4_RULES
"""An NFSv4 ACL is a count and entries of a type, flags, permissions, and a name with its length, padded to four bytes.

All are big-endian 32-bit numbers. These permissions change content, remove what is in a folder, or change permissions,
the last alone for NFS4_RULES: of a sticky folder's mode, Linux makes permission to remove what is in it, and heeds the
sticky bit. Source: RFC 7530, 6.2 (nfsace4), and RFC 7531; fs/nfsd/nfs4acl.c, mask_from_posix."""


def group_writer(path: str, *, owner: int, group: int, users_group: bool = False) -> str | None:
    """Which other user or group may change a file or directory that its group may write; None if none may.

    `users_group`, here and below: whether the group with this user's number counts as no other one.
    """
    try:
        acl = read_acl(path)
    except OSError as error:
        return f"has an ACL that cannot be read ({error.strerror})"
    if acl is not None:
        return acl_writer(acl, owner=owner, group=group, users_group=users_group)
    return None if _is_private(group, owner, users_group) else f"may be written by group {group}"


def _is_private(group: int, owner: int, users_group: bool) -> bool:
    """Whether only root, the owner or this user is taken to be in this group.

    Root owns the volumes that Kubernetes gives to this user's group, in which it then has all containers of the pod.
    Where root has no number, the numbers outside of the user namespace count: that of the user may be 0 inside.
    """
    users = (owner, os.geteuid()) if users_group else (owner,)
    if not is_unmapped(os.stat("/").st_uid):
        return group == 0 or (group in users and not is_ambiguous(group))
    outside = _number_outside("gid", group)
    return outside is not None and outside in (_number_outside("uid", user) for user in users)


def _number_outside(kind: str, number: int) -> int | None:
    """The number of a user or group in the parent of this user namespace; None if it has none there.

    Source: user_namespaces(7). Raises: OSError.
    """
    for line in read_proc(f"/proc/self/{kind}_map").splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= number < inside + count:
            return outside + number - inside
    return None


def read_acl(file: str | int) -> bytes | None:
    """The POSIX ACL of a file or directory, a path or a descriptor; None if it has none. Raises: OSError."""
    if not hasattr(os, "getxattr"):
        return None
    try:
        return os.getxattr(file, ACL)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def set_acl(fd: int, acl: bytes | None) -> bool:
    """Whether the opened file has this POSIX ACL, or none. Effect: sets or removes it, if the file system has ACLs."""
    try:
        if acl is not None:
            os.setxattr(fd, ACL, acl)
        elif hasattr(os, "removexattr"):
            os.removexattr(fd, ACL)
    except OSError as error:
        return acl is None and error.errno in ABSENT
    return True


def common_permissions(acl: bytes | None, mode: int) -> int:
    """The permissions that each user but the owner has on a file with this mode and this ACL, if it has one.

    With an ACL, the group's bits of the mode are its mask. Source: acl(5).
    """
    common = mode >> 3 & mode & 7
    for tag, permissions, _ in _acl_entries(acl or b""):
        common &= permissions if tag in (ACL_USER, ACL_GROUP_OWNER, ACL_GROUP) else 7
    return common


def acl_writer(acl: bytes, *, owner: int, group: int, users_group: bool = False) -> str | None:
    """Which user or group an ACL lets write, other than root, this process's user and the owner; None if none."""
    if _number(acl[:ACL_HEADER_BYTES]) != ACL_VERSION:
        return "has an ACL of an unknown version"
    entries = list(_acl_entries(acl))
    mask = next((permissions for tag, permissions, _ in entries if tag == ACL_MASK), WRITE)
    for tag, permissions, number in entries:
        if not permissions & mask & WRITE:
            continue
        if tag == ACL_USER and number not in (0, owner, os.geteuid()):
            return f"may be written by user {number}, by its ACL"
        in_group = group if tag == ACL_GROUP_OWNER else number
        if tag in (ACL_GROUP_OWNER, ACL_GROUP) and not _is_private(in_group, owner, users_group):
            return f"may be written by group {in_group}, by its ACL"
    return None


def _acl_entries(acl: bytes) -> Iterator[tuple[int, int, int]]:
    """Tag, permissions and id of each entry."""
    for at in range(ACL_HEADER_BYTES, len(acl) - ACL_ENTRY_BYTES + 1, ACL_ENTRY_BYTES):
        yield _number(acl[at : at + 2]), _number(acl[at + 2 : at + 4]), _number(acl[at + 4 : at + 8])


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def nfs4_writer(
    acl: bytes, *, owner: int, group: int, asked: int = NFS4_WRITES, users_group: bool = False
) -> str | None:
    """Which user or group an NFSv4 ACL lets write, other than root, this process's user and the owner; None if none.

    `asked`: the permissions that count.

    What an entry denies is not subtracted from what another allows. The mode shows neither, unlike that of a POSIX ACL.
    """
    try:
        entries = list(_nfs4_entries(acl))
    except ValueError:
        return "has an NFSv4 ACL that cannot be read"
    for kind, flags, permissions, who in entries:
        if kind != NFS4_ALLOWS or flags & NFS4_FOR_CHILDREN or not permissions & asked or who == "OWNER@":
            continue
        if who == "EVERYONE@":
            return "may be written by everyone, by its NFSv4 ACL"
        if who == "GROUP@" or flags & NFS4_OF_GROUP:
            number = group if who == "GROUP@" else _group_number(who)
            if number is None or not _is_private(number, owner, users_group):
                return f"may be written by group {group if who == 'GROUP@' else who}, by its NFSv4 ACL"
        elif not _is_own_user(who, owner):
            return f"may be written by user {who}, by its NFSv4 ACL"
    return None


def _nfs4_entries(acl: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Type, flags, permissions and name of each entry. Raises: ValueError."""
    at = 4
    for _ in range(int.from_bytes(acl[:4], "big")):
        if at + 16 > len(acl):
            raise ValueError("an entry is cut off")
        kind, flags, permissions, length = (int.from_bytes(acl[at + 4 * i : at + 4 * i + 4], "big") for i in range(4))
        who = acl[at + 16 : at + 16 + length]
        if len(who) < length:
            raise ValueError("a name is cut off")
        yield kind, flags, permissions, who.decode("utf-8", "replace")
        at += 16 + (length + 3) // 4 * 4


def _is_own_user(who: str, owner: int) -> bool:
    """Whether a user's name (NAME@DOMAIN) or number is that of root, of the owner or of this process's user."""
    name = who.partition("@")[0]
    if name.isascii() and name.isdigit():
        return name in ("0", str(owner), str(os.geteuid()))
    return is_own_name(name)


def _group_number(who: str) -> int | None:
    """The number of a group of this name (NAME@DOMAIN) or number; None if there is none."""
    name = who.partition("@")[0]
    if name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS:
        return int(name)
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
