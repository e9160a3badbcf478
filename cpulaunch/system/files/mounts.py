"""File systems that another user mounted: that user decides what is in them, whatever owner and mode say."""

from __future__ import annotations

import os

from cpulaunch.system.files.reading import read_proc

MOUNTS, USER_MOUNTS = "/proc/self/mountinfo", "/run/mount/utab"
FUSE = (b"fuse", b"fuseblk")


def other_mounter(fd: int) -> str | None:
    """In whose file system an opened file, folder or link is, if another user mounted it, as text; None if none did.

    That of "/" belongs to root. One that is listed nowhere was detached after the opening, as a user may detach a FUSE
    mount of their own. Without /proc, nothing tells.
    """
    if os.fstat(fd).st_dev == os.stat("/").st_dev:
        return None
    try:
        mount = _mount_id(fd)
        root = os.open("/", getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if mount is None or mount == _mount_id(root):
                return None
        finally:
            os.close(root)
        return mounter(mount, _content(MOUNTS), _content(USER_MOUNTS))
    except OSError as error:
        return f"is in a file system that cannot be checked ({error.strerror})"


def _mount_id(fd: int) -> bytes | None:
    """The number of the mount that a descriptor refers to; None if it cannot be known. Source: proc(5), fdinfo."""
    lines = _content(f"/proc/self/fdinfo/{fd}").split(b"\n")
    return next((line[len(b"mnt_id:") :].strip() for line in lines if line.startswith(b"mnt_id:")), None)


def _content(path: str) -> bytes:
    """The content of a file, empty if it is absent. Raises: OSError."""
    try:
        return read_proc(path)
    except FileNotFoundError:
        return b""


def mounter(mount: bytes, mountinfo: bytes, user_mounts: bytes) -> str | None:
    """Who mounted the file system of a mount with this number, as text, if it was another user; None if it was not.

    That user decides what is read there, whatever owner and mode say: by a FUSE server, or through the raw device.
    Spaces and line ends in names are escaped; no other character separates, whatever it is in Unicode.
    Source: proc(5), /proc/pid/mountinfo; Linux, fs/fuse/inode.c, fuse_show_options.
    """
    words = next((words for line in mountinfo.split(b"\n") if (words := line.split(b" "))[0] == mount), [])
    if b"-" not in words[6:-2]:
        return "is in a file system that is mounted nowhere, or by an unknown user"
    end = words.index(b"-", 6)  # The source behind the kind may be empty.
    kind, options = words[end + 1].partition(b".")[0], _pairs(b" ".join(words[end + 3 :]), b",")
    user = _text(options.get(b"user_id", b"unknown"))
    if kind in FUSE and user not in ("0", str(os.geteuid())):
        return f"is in a file system that user {user} serves (FUSE)"
    name = _mount_users(user_mounts).get(words[4], "root")
    return None if is_own_name(name) else f"is in a file system that user {name} mounted"


def _mount_users(user_mounts: bytes) -> dict[bytes, str]:
    """By mount point: the name of the user who mounted it, as fstab permits it to users. Source: libmount, utab."""
    users = {}
    for line in user_mounts.split(b"\n"):
        fields = _pairs(line, b" ")
        user = _pairs(fields.get(b"OPTS", b""), b",").get(b"user")
        if user and b"TARGET" in fields:
            users[fields[b"TARGET"]] = _text(user)
    return users


def _pairs(data: bytes, separator: bytes) -> dict[bytes, bytes]:
    return {name: value for name, _, value in (word.partition(b"=") for word in data.split(separator))}


def _text(data: bytes) -> str:
    return ascii(data.decode("utf-8", "replace"))[1:-1]


def is_own_name(name: str) -> bool:
    """Whether a user name is root's or that of this process's user."""
    if name == "root" or os.geteuid() == 0:
        return name == "root"
    import pwd  # Only where a library is in a user's mount.

    try:
        return pwd.getpwnam(name).pw_uid in (0, os.geteuid())
    except KeyError:
        return False
