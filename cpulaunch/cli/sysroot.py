"""The captured machine that --sysroot names."""

import os

from cpulaunch.probe import Root
from cpulaunch.records.errors import UsageError


def machine_root(path: str) -> Root:
    """The root of the machine captured under this directory, or of this one ("/").

    Raises: UsageError if nothing of a machine is there, so that a mistyped directory is not taken for a small machine.
    """
    if not os.path.isdir(path):
        raise UsageError(
            "no such directory", value=repr(path), source="--sysroot", hint="--sysroot DIR, of a captured machine"
        )
    root = Root(path)
    if not (root.live or root.exists("sys") or root.exists("proc")):
        raise UsageError(
            "no captured machine",
            value=repr(path),
            source="--sysroot",
            hint="name the directory that holds sys and proc",
        )
    return root
