"""The Python that runs the workers, where it may be another one than cpulaunch's own.

`pipx` and `uv tool` install cpulaunch in an environment of its own, which has no torch.
"""

from __future__ import annotations

import os
import sys

from cpulaunch.probe.software.torch_files import (
    environment_prefix,
    has_torch,
    is_torch_known,
    python_version,
    startup_paths,
)
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import Host
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import Program, WorkerPython
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLES = {"VIRTUAL_ENV": "virtual", "CONDA_PREFIX": "conda"}
"""The variables with which a shell says which environment is active, and its kind."""
PROGRAMS = ("bin/python", "bin/python3")
PLUGIN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "on_path")
OLDEST_PYTHON = (3, 10)
"""The oldest Python that the plugin runs in: autoload.OLDEST_PYTHON."""
NEARBY = (".venv", "venv", "env")
"""Environments in the current folder that a hint may name."""


@record
class ActiveEnvironment:
    """An active environment with a Python. `default`: every shell has it, without the user's doing."""

    variable: str
    prefix: str
    python: str
    title: str
    default: bool = False


@record
class OwnPython:
    """The Python that runs cpulaunch. `named`: the user named it, as in `python -m cpulaunch`."""

    path: str
    prefix: str
    named: bool


def this_python() -> OwnPython:
    """The Python that runs this process."""
    named = sys.argv[0].endswith(os.path.join("cpulaunch", "__main__.py"))
    return OwnPython(path=sys.executable, prefix=sys.prefix, named=named)


def choose_python(root: Root, environ: Mapping[str, str], own: OwnPython | None = None) -> WorkerPython:
    """The Python of the active environment, or cpulaunch's own.

    The own one runs workers if it alone has torch, and if both have it where the user named it or put it in front of
    the active one in PATH, and instead of conda's base environment, which is active in every shell.
    """
    own = own or this_python()
    active = next(_active(root, environ), None)
    missing = _missing(root, environ)
    if active is None or os.path.realpath(active.prefix) == os.path.realpath(own.prefix):
        reason = "cpulaunch's own environment" + ("" if active is None else f", which is {active.title}")
        return WorkerPython(path=own.path, origin="default", reason=reason, notice=missing)
    own_torch = _has_torch(root, own.path, environ)
    active_torch = _has_torch(root, active.python, environ)
    named = own.named or _precedes(environ, os.path.dirname(own.path), os.path.dirname(active.python))
    if own_torch and not active_torch:
        without = f"{active.title} ({active.prefix}) has no torch"
        notice = f"{without}: cpulaunch's own Python runs the program; --python {active.prefix} insists"
        return WorkerPython(
            path=own.path,
            origin="default",
            reason=f"cpulaunch's own environment; {without}",
            notice=missing if active.default or named else escaped(notice),
        )
    if own_torch and (named or active.default):
        why = "which was named" if own.named else "which is first in PATH" if named else f"not {active.title}"
        reason = f"cpulaunch's own environment, {why}"
        return WorkerPython(path=own.path, origin="default", reason=reason, notice=missing)
    return WorkerPython(
        path=active.python, origin="environment", reason=f"{active.title}, by {active.variable}", notice=missing
    )


def _active(root: Root, environ: Mapping[str, str]) -> Iterator[ActiveEnvironment]:
    """The active environments that have a Python, the one that is first in PATH first."""
    path = environ.get("PATH", "").split(os.pathsep)
    found = []
    for name, kind in VARIABLES.items():
        prefix = environ.get(name, "").rstrip("/")
        python = environment_python(root, prefix)
        if python is not None and _writer(root, prefix, python, path) is None:
            base = name == "CONDA_PREFIX" and _is_base(root, prefix, environ)
            title = "conda's base environment" if base else f"the active {kind} environment"
            found.append(ActiveEnvironment(variable=name, prefix=prefix, python=python, title=title, default=base))
    yield from sorted(found, key=lambda each: _position(path, f"{each.prefix}/bin"))


def _is_base(root: Root, prefix: str, environ: Mapping[str, str]) -> bool:
    """Whether this is conda's base environment, in which conda itself is installed."""
    return environ.get("CONDA_DEFAULT_ENV") == "base" or root.exists(f"{prefix}/condabin")


def _writer(root: Root, prefix: str, python: str, path: list[str]) -> str | None:
    """What another user can change of an environment's Python, if a variable alone names the environment; else None.

    `sudo -E` keeps VIRTUAL_ENV of the user who typed it, but not PATH: a shell would run another Python. The Python of
    an environment that is in PATH would run without cpulaunch, too.
    """
    folder = os.path.realpath(os.path.dirname(python))
    if any(os.path.realpath(each) == folder and _is_in(each, prefix) for each in path if os.path.isabs(each)):
        return None
    from cpulaunch.system.files.trust import untrusted_part  # Not needed where PATH has the environment, or none is.

    paths = startup_paths(root, python, prefix)
    try:
        parts = (untrusted_part(each, may_be_missing=each != python) for each in paths)
        return next((part for part in parts if part is not None), None)
    except OSError as error:
        return f"{prefix} cannot be checked ({error.strerror})"


def _is_in(folder: str, prefix: str) -> bool:
    """Whether a folder of PATH is in this environment, whose bin may itself be a link to another one's."""
    return os.path.realpath(os.path.dirname(folder.rstrip("/"))) == os.path.realpath(prefix)


def _missing(root: Root, environ: Mapping[str, str]) -> str:
    """A line on the variables that name an environment whose Python is not there, or not safe; empty if none does."""
    path = environ.get("PATH", "").split(os.pathsep)
    gone, unsafe = [], []
    for name, prefix in ((name, environ[name]) for name in VARIABLES if environ.get(name)):
        python = environment_python(root, prefix)
        writer = None if python is None else _writer(root, prefix.rstrip("/"), python, path)
        if python is None:
            gone.append(f"{name}={prefix}")
        elif writer is not None:
            unsafe.append(f"{name}={prefix} is ignored: it is not in PATH, and {writer}; --python {prefix} insists")
    missing = [f"not an environment with a Python, and ignored: {', '.join(gone)}"] if gone else []
    return escaped("; ".join([*missing, *unsafe]))


def environment_python(root: Root, prefix: str) -> str | None:
    """The Python of an environment, by the environment's folder; None if there is none."""
    if not os.path.isabs(prefix):
        return None
    prefix = prefix.rstrip("/")
    return next((f"{prefix}/{name}" for name in PROGRAMS if _is_there(root, f"{prefix}/{name}")), None)


def _is_there(root: Root, path: str) -> bool:
    """Whether there is a file at the end of links: those of an environment whose base was removed lead nowhere."""
    try:
        return root.exists(root.resolve_links(path)[-1])
    except OSError:
        return False


def _position(path: list[str], folder: str) -> int:
    return path.index(folder) if folder in path else len(path)


def _precedes(environ: Mapping[str, str], first: str, second: str) -> bool:
    """Whether a folder comes before another one in PATH."""
    path = environ.get("PATH", "").split(os.pathsep)
    return _position(path, first) < _position(path, second)


def _has_torch(root: Root, python: str, environ: Mapping[str, str]) -> bool:
    """Whether this Python has torch, or may have one: its packages cannot be found."""
    prefix = environment_prefix(root, python)
    return has_torch(root, python, prefix, environ) or not is_torch_known(root, python, prefix, environ)


def with_plugin_path(host: Host, python: str, own: OwnPython | None = None) -> Host:
    """The host with the folder of the plugin, if the workers' Python is in an environment without this cpulaunch."""
    own = own or this_python()
    if python == own.path:
        return host
    prefix = environment_prefix(Root(), python)
    installed = host.torch is not None and host.torch.plugin
    if prefix is None or (installed and os.path.realpath(prefix) == os.path.realpath(own.prefix)):
        return host
    version = python_version(Root(), python, prefix)
    if version is not None and version < OLDEST_PYTHON:
        return host
    return replace(host, plugin_path=PLUGIN_FOLDER)


def missing_torch(
    host: Host, program: Program | None, python: WorkerPython, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """A warning that says what to do, if the Python of a program has no torch."""
    if program is None or program.kind == "command" or host.torch is not None or not host.torch_known:
        return ()
    near = next((name for name in NEARBY if _is_near(name, environ)), None)
    hint = "install it there, activate the environment that has it, or name that one with --python"
    if near is not None:
        hint = f"{near} has it: --python {near}"
    return (escaped(f"{python.path} ({python.reason}) has no torch: {hint}"),)


def _is_near(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a folder of the current one, unless another user put it there, is an environment with torch."""
    from cpulaunch.system.files.paths import is_of_current_folder  # Most Pythons have torch.

    try:
        if not is_of_current_folder(name):
            return False
        python = environment_python(Root(), os.path.abspath(name))
    except OSError:
        return False  # There is none, or the current folder was removed.
    return python is not None and has_torch(Root(), python, environment_prefix(Root(), python), environ)
