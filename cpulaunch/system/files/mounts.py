"""File systems that another user mounted: that user decides what is in them, whatever owner and mode say."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNTS, USER_MOUNTS = "proc/self/mountinfo", "run/mount/utab"


def other_mounter(device: int) -> str | None:
    """Whose file system this device of the running machine is, if another user mounted it; None if none did."""
    mounts, user_mounts = (_text(f"/{name}") for name in (MOUNTS, USER_MOUNTS))
    return next((reason for number, reason in foreign_mounts(mounts, user_mounts) if number == device), None)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def foreign_mounts(mountinfo: str, user_mounts: str) -> Iterator[tuple[int, str]]:
    """Device numbers of the file systems that another user mounted, and the reason as text.

    That user decides what is read there, whatever owner and mode say: by a FUSE server, or through the raw device.
    Source: proc(5), /proc/pid/mountinfo; Linux, fs/fuse/inode.c, fuse_show_options; libmount, /run/mount/utab, which
    has the name of the user for mounts that fstab permits to users.
    """
    names = _mount_users(user_mounts)
    for line in mountinfo.splitlines():
        words = line.split()
        if "-" not in words[6:-1]:
            continue
        kind, options = words[words.index("-", 6) + 1], words[-1]  # Between them the source, which may be empty.
        major, _, minor = words[2].partition(":")
        device = os.makedev(int(major), int(minor))
        user = dict(option.partition("=")[::2] for option in options.split(",")).get("user_id", "0")
        if kind.startswith("fuse") and user not in ("0", str(os.geteuid())):
            yield device, f"is in a file system that user {user} serves (FUSE)"
        elif words[4] in names and not is_own_name(names[words[4]]):
            yield device, f"is in a file system that user {names[words[4]]} mounted"


def _mount_users(user_mounts: str) -> dict[str, str]:
    """By mount point: the name of the user who mounted it."""
    users = {}
    for line in user_mounts.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        options = dict(option.partition("=")[::2] for option in fields.get("OPTS", "").split(","))
        if "TARGET" in fields and options.get("user"):
            users[fields["TARGET"]] = options["user"]
    return users


def is_own_name(name: str) -> bool:
    """Whether a user name is root's or that of this process's user."""
    if name == "root" or os.geteuid() == 0:
        return name == "root"
    import pwd  # Only where a library is in a user's mount.

    try:
        return pwd.getpwnam(name).pw_uid in (0, os.geteuid())
    except KeyError:
        return False
