"""Folders that a launch needs at its end, held open: a worker of root may mount over them what never answers.

A file system that is mounted over a folder covers its path, not a descriptor that was opened before.
"""

from __future__ import annotations

import os

_held: dict[str, int] = {}
"""Descriptors by path, of this process and of those that it forks."""


def hold(*folders: str) -> None:
    """Effect: from now on, what is in these folders is found by their descriptors; not in those that are missing."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
    for folder in folders:
        try:
            _held[folder] = os.open(folder, flags)
        except OSError:
            continue


def held(path: str) -> tuple[str, int | None]:
    """The path, relative to the held folder that it is in, and that folder's descriptor; None where none is held."""
    for folder, fd in _held.items():
        if path == folder:
            return ".", fd
        if path.startswith(f"{folder}/"):
            return path[len(folder) + 1 :], fd
    return path, None


def open_held(path: str, flags: int) -> int:
    """A descriptor of what has this path. Raises: OSError."""
    name, folder = held(path)
    return os.open(name, flags | os.O_CLOEXEC, dir_fd=folder)


def list_held(path: str) -> list[str]:
    """The names in a folder. Raises: OSError."""
    fd = open_held(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def read_held_link(path: str) -> str:
    """What a link refers to. Raises: OSError."""
    name, folder = held(path)
    return os.readlink(name, dir_fd=folder)
