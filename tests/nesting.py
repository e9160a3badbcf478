"""Folders nested deeper than Python's functions recurse."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEPTH = 1500


@contextmanager
def nested_folders(start: Path, name: str) -> Iterator[str]:
    """The path, relative to `start`, of a file in the innermost of many folders. Effect: they exist meanwhile."""
    folder = os.open(start, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=folder)
        folder = _moved(folder, "a")
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    try:
        yield "a/" * DEPTH + name
    finally:
        os.unlink(name, dir_fd=folder)
        for _ in range(DEPTH):
            folder = _moved(folder, "..")
            os.rmdir("a", dir_fd=folder)
        os.close(folder)


def _moved(folder: int, name: str) -> int:
    """A descriptor of the folder of this name. Effect: closes the other one."""
    following = os.open(name, os.O_RDONLY, dir_fd=folder)
    os.close(folder)
    return following
