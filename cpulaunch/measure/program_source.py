"""The files that hold a program's source, found without running any of it."""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from importlib.machinery import PathFinder

from cpulaunch.launch.process.program import find_executable
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.system.files.reading import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cpulaunch.records.request import ProgramKind

MAIN = "__main__"
MAX_SOURCE = 1 << 22
MOST_MODULES = 500
"""Of a program's own, that are read."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders whose modules the versions of packages stand for."""
OTHERS = frozenset({"torch", "numpy", "cpulaunch"})
"""Modules whose versions are known, wherever they are."""
LITERAL = re.compile(rb"""["']([A-Za-z_]\w*)["']|\$\{?([A-Za-z_]\w*)""")
"""A name in quotes, as in os.environ["NAME"], or behind a dollar, as in a shell's $NAME."""
SHORTEST_PREFIX = 3
OF_A_SESSION = re.compile(
    r"_|SHLVL|PWD|OLDPWD|COLUMNS|LINES|TERM|DISPLAY|WINDOWID|STY|TMUX\w*|TMPDIR|INVOCATION_ID|JOURNAL_STREAM"
    r"|(SSH|DBUS|XDG_SESSION)_\w+|\w*(JOB|STEP|SESSION)_?ID|\w+_PID|\w+_(START|END)_TIME"
)
"""Variables that are others in each terminal, or each job of a scheduler, and do not say what is computed."""
SOURCES = (".py", ".sh")
CONFIGURATIONS = (".cfg", ".conf", ".ini", ".toml", ".yaml", ".yml")
"""Ends of the names of files that decide what a program does, and that programs seldom write."""


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
    """The source of a module in these folders, that of its __main__ for a package; packages are not imported.

    Each part is looked up by its own name alone: importlib takes the folders of a part of a namespace package, by its
    whole name, from the package, which must have been imported.
    """
    spec = None
    places: Sequence[str] | None = path
    for part in name.split("."):
        spec = None if places is None else PathFinder.find_spec(part, places)
        if spec is None:
            return None
        found = spec.submodule_search_locations
        places = None if found is None else list(found)
    if places is not None:
        spec = PathFinder.find_spec(MAIN, places)
    return None if spec is None or not spec.has_location else spec.origin


def read_source(path: str | None) -> bytes:
    """The text of a source, of a long one its beginning; empty if it cannot be read."""
    if path is None:
        return b""
    try:
        return read_start(os.path.realpath(path), max_bytes=MAX_SOURCE)
    except OSError:
        return b""


def own_folders(kind: ProgramKind, path: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The folders in which Python looks for the modules of a program, without those of installed packages."""
    first = os.getcwd() if kind == "module" else os.path.dirname(path)
    given = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    library = os.path.dirname(os.__file__)
    known = (each for each in sys.path[1:] if os.path.isdir(each) and not each.startswith(library))
    folders = (each for each in (*given, *known) if not any(name in each.split(os.sep) for name in INSTALLED))
    return tuple(dict.fromkeys((first, *folders)))


def argument_files(arguments: Iterable[str]) -> tuple[str, ...]:
    """The scripts and configuration files that arguments name, by themselves or as in `--config=FILE`."""
    names = (each.partition("=")[2] if each.startswith("-") else each for each in arguments)
    files = (each for each in names if each.endswith((*SOURCES, *CONFIGURATIONS)) and os.path.isfile(each))
    return tuple(dict.fromkeys(map(os.path.realpath, files)))


def imported_sources(path: str, folders: Sequence[str], *, first: Iterable[str] = ()) -> tuple[str, ...]:
    """The files of the modules in these folders that a source imports, those that they import, and so on.

    `first`: modules that are imported anyway. They are read, not run: what is imported by a name that a program makes
    is not among them.
    """
    found = dict.fromkeys([path, *(file for name in first for file in _module_files(name, folders))])
    left = [*found]
    while left and len(found) <= MOST_MODULES:
        source = left.pop()
        for name, level in _imports(read_source(source)):
            for file in _module_files(name, [_folder_above(source, level)] if level else folders):
                if file not in found:
                    found[file] = None
                    left.append(file)
    return tuple(sorted(found.keys() - {path}))


def _imports(data: bytes) -> Iterator[tuple[str, int]]:
    """Each name that a source imports, and the dots in front of it; none of what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It is for the program's own run to say them.
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, 0) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            yield from ((start + each.name, node.level) for each in node.names)


def _folder_above(source: str, level: int) -> str:
    """The folder that so many dots in front of an import stand for."""
    folder = os.path.dirname(source)
    for _ in range(level - 1):
        folder = os.path.dirname(folder)
    return folder


def _module_files(name: str, folders: Iterable[str]) -> list[str]:
    """The files of a module and of the packages that it is in, from the first folder that has any."""
    parts = name.split(".")
    if parts[0] in OTHERS:
        return []
    return next((files for folder in folders if (files := list(_files_in(folder, parts)))), [])


def _files_in(folder: str, parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        file = os.path.join(folder, f"{part}.py")
        folder = os.path.join(folder, part)
        package = os.path.join(folder, "__init__.py")
        if os.path.isfile(package):
            yield package
        elif os.path.isfile(file):
            yield file
            return
        elif not os.path.isdir(folder):
            return


def named_variables(sources: Iterable[bytes], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that sources name, each whole or by a beginning that ends with an underscore.

    Those of a terminal's session or of one job are left out.
    """
    names = {first or second for data in sources for first, second in LITERAL.findall(data)}
    known = {name.decode() for name in names}
    prefixes = tuple(name for name in known if name.endswith("_") and len(name) >= SHORTEST_PREFIX)
    named = (name for name in environ if name in known or name.startswith(prefixes))
    return {name: environ[name] for name in named if OF_A_SESSION.fullmatch(name) is None}
