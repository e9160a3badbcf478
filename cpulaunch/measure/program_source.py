"""The file that holds a program's source, found without running any of it."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from cpulaunch.launch.process.program import find_executable
from cpulaunch.records.errors import CpulaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.records.request import ProgramKind

MAIN = "__main__"


def source_file(kind: ProgramKind, target: str, environ: Mapping[str, str]) -> str | None:
    """The path of a script, of a module as `python -m` finds it, or of a command; None if it is not found."""
    if kind == "module":
        given = environ.get("PYTHONPATH", "")
        return module_file(target, [os.getcwd(), *filter(None, given.split(os.pathsep)), *sys.path])
    if kind == "command":
        try:
            return os.path.realpath(find_executable(target, environ))
        except CpulaunchError:
            return None
    path = os.path.realpath(target)
    return os.path.join(path, f"{MAIN}.py") if os.path.isdir(path) else path


def module_file(name: str, path: Sequence[str]) -> str | None:
    """The source of a module in these folders, that of its __main__ for a package; packages are not imported."""
    spec, begun = None, ""
    places: Sequence[str] | None = path
    for part in name.split("."):
        begun = f"{begun}.{part}" if begun else part
        spec = None if places is None else PathFinder.find_spec(begun, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if places is not None:
        spec = PathFinder.find_spec(f"{name}.{MAIN}", places)
    return None if spec is None or not spec.has_location else spec.origin
