"""The captured machine that --sysroot names."""

import os

from cpulaunch.probe import Root
from cpulaunch.records.errors import UsageError


def machine_root(path: str) -> Root:
    """The root of the machine captured under this directory, or of this machine ("/").

    Raises: UsageError if the directory holds no captured machine: a mistyped path must not look like a small machine.
    """
    if not os.path.isdir(path):
        raise UsageError(
            "directory not found",
            value=repr(path),
            source="--sysroot",
            hint="give the root directory of a captured machine",
        )
    root = Root(path)
    if not (root.live or root.exists("sys") or root.exists("proc")):
        raise UsageError(
            "the directory holds no captured machine",
            value=repr(path),
            source="--sysroot",
            hint="give the directory that contains sys/ and proc/",
        )
    return root
