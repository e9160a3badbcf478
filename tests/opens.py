"""Whether a file is opened, as the kernel tells it: an open by O_PATH is none. Source: inotify(7)."""

import ctypes
import os

OPENED = 0x20
"""Source: Linux, include/uapi/linux/inotify.h, IN_OPEN."""


def opens(path, action):
    """Whether the action opens what is at this path."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(fd, os.fsencode(path), OPENED) >= 0, os.strerror(ctypes.get_errno())
    try:
        action()
        return bool(os.read(fd, 4096))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
