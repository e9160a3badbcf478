"""The torch of the worker's environment, from its files; it is never imported here."""

from __future__ import annotations

import os
import sys
from itertools import islice
from types import MappingProxyType

from cpulaunch.probe.software.elf import exports
from cpulaunch.records.host import EXTENSIONS, Torch
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OPENMP = ("libgomp", "libiomp5", "libomp")
MKL_DISPATCH = "mkl_serv_intel_cpu_true"
PLUGIN, PLUGIN_GROUP = "cpulaunch-", "[torch.backends]"
METADATA = (".dist-info", ".egg-info")
EDITABLE_TORCH = ("__editable___torch_", "__editable__.torch-")
MAX_BYTES, MAX_PTH_LINES = 1 << 16, 1000
"""Of one file that is read here, and of all .pth files of a folder: the current folder's environment may be another
user's."""
MAX_PYTHONS = 16
"""Folders of Pythons in one lib folder."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def environment_prefix(root: Root, interpreter: str | None) -> str | None:
    """The folder of the interpreter's environment ("/opt/env" for /opt/env/bin/python).

    A link to an interpreter elsewhere counts as that one, unless a virtual environment made it.
    """
    if interpreter is None or not os.path.isabs(interpreter):
        return None
    prefix = os.path.dirname(os.path.dirname(interpreter))
    if root.exists(f"{prefix}/pyvenv.cfg") or any(_python_folders(root, f"{prefix}/lib")):
        return prefix
    try:
        return os.path.dirname(os.path.dirname(root.resolve_links(interpreter)[-1]))
    except OSError:
        return prefix


def read_torch(
    root: Root, interpreter: str | None, prefix: str | None, environ: Mapping[str, str] = NO_VARIABLES
) -> Torch | None:
    """The torch that this interpreter would import, started with `environ`; None if it has none."""
    folders = tuple(_site_folders(root, interpreter, prefix, environ))
    for folder in folders:
        version = _torch_version(root, folder)
        if version is not None:
            return Torch(
                version=version,
                path=f"{folder}/torch",
                bundled_openmp=_bundled_openmp(root, folder),
                mkl_dispatch_symbol=exports(root, f"{folder}/torch/lib/libtorch_cpu.so", MKL_DISPATCH),
                extensions=tuple(name for name in EXTENSIONS if any(root.exists(f"{at}/{name}") for at in folders)),
                plugin=any(_has_plugin(root, at) for at in (folder, *folders)),
            )
    return None


def has_torch(root: Root, interpreter: str, prefix: str | None, environ: Mapping[str, str]) -> bool:
    """Whether this interpreter would find a torch, as far as files show."""
    folders = _site_folders(root, interpreter, prefix, environ)
    return any(_torch_version(root, folder) is not None for folder in folders)


def is_torch_known(root: Root, interpreter: str | None, prefix: str | None, environ: Mapping[str, str]) -> bool:
    """Whether the folders of the interpreter's packages were found, and none has a torch that only Python can find.

    Source: setuptools, editable installations ("__editable___torch_2_13_finder.py").
    """
    folders = [folder for folder in _site_folders(root, interpreter, prefix, environ) if root.exists(folder)]
    names = (name for folder in folders for name in root.names(folder))
    return bool(folders) and not any(name.startswith(EDITABLE_TORCH) for name in names)


def startup_paths(root: Root, interpreter: str, prefix: str) -> Iterator[str]:
    """An environment's interpreter and what decides which modules it loads; not all of these paths exist.

    What a path says is read once the next one is asked for. Packages in /usr/local, which Debian's group "staff" may
    write, are left out: they are those of the system's Python, too. Source: Python, site; PEP 405: with a pyvenv.cfg,
    the standard library is that of its `home`.
    """
    yield interpreter
    yield f"{prefix}/pyvenv.cfg"
    version, home = python_version(root, interpreter, prefix), _environment_config(root, prefix).get("home")
    for base in (prefix, *([os.path.dirname(home)] if home else [])):
        for lib in (f"{base}/lib", f"{base}/lib64"):
            yield lib
            yield from _python_folders(root, lib, version)
    for folder in (*_packages(root, prefix, version), *_base_packages(root, prefix, version)):
        if not folder.startswith("/usr/local/lib/python"):
            yield f"{folder}/torch/__init__.py"
            yield from (f"{folder}/{name}" for name in root.names(folder) if name.endswith(".pth"))
            yield from _added_folders(root, folder)


def python_version(root: Root, interpreter: str, prefix: str) -> tuple[int, int] | None:
    """The version of an interpreter, from its environment's pyvenv.cfg, its file's name, or its packages' folder.

    None if none of them says it. Source: PEP 405; virtualenv and uv write `version_info`.
    """
    config = _environment_config(root, prefix)
    for text in (config.get("version_info", config.get("version", "")), _file_version(root, interpreter)):
        if (version := _minor_version(text)) is not None:
            return version
    folders = {os.path.basename(folder) for folder in _python_folders(root, f"{prefix}/lib")} - {"python3"}
    return _minor_version(folders.pop().removeprefix("python")) if len(folders) == 1 else None


def _file_version(root: Root, interpreter: str) -> str:
    """What follows "python" in the name of the interpreter's file, links resolved: "3.12"."""
    try:
        return os.path.basename(root.resolve_links(interpreter)[-1]).removeprefix("python")
    except OSError:
        return ""


def _minor_version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])


def _has_plugin(root: Root, folder: str) -> bool:
    """Whether a folder's cpulaunch, if it has one, tells torch of its plugin.

    Source: Core metadata specifications, "Recording installed projects"; entry points specification.
    """
    return any(
        PLUGIN_GROUP in (root.text(f"{folder}/{name}/entry_points.txt", limit=MAX_BYTES) or "")
        for name in root.names(folder)
        if name.startswith(PLUGIN) and name.endswith(METADATA)
    )


def _torch_version(root: Root, folder: str) -> str | None:
    """The literal that the version.py of the torch in a folder of packages assigns to __version__."""
    for line in (root.text(f"{folder}/torch/version.py", limit=MAX_BYTES) or "").splitlines():
        name, equals, value = line.partition("=")
        if equals and name.partition(":")[0].strip() == "__version__":
            return value.strip().strip("'\"") or None
    return None


def _bundled_openmp(root: Root, folder: str) -> str | None:
    for place in (f"{folder}/torch/lib", f"{folder}/torch.libs"):
        for name in sorted(root.names(place)):
            if name.startswith(OPENMP) and ".so" in name:
                return f"{place}/{name}"
    return None


def _site_folders(root: Root, interpreter: str | None, prefix: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    """Folders that `import torch` would look in, in order; this process's own if it is the same interpreter."""
    if root.live and interpreter == sys.executable:
        yield from (path for path in sys.path if os.path.isabs(path))
    elif interpreter is not None and prefix is not None:
        version = python_version(root, interpreter, prefix)
        if root.live:
            yield from (path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path))
            yield from _users_packages(root, prefix, version, environ)
        for folder in (*_packages(root, prefix, version), *_base_packages(root, prefix, version)):
            yield folder
            yield from _added_folders(root, folder)


def _environment_config(root: Root, prefix: str) -> dict[str, str]:
    """The entries of a virtual environment's pyvenv.cfg; empty if it is none."""
    pairs = (line.partition("=") for line in (root.text(f"{prefix}/pyvenv.cfg", limit=MAX_BYTES) or "").splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _base_packages(root: Root, prefix: str, version: tuple[int, int] | None) -> Iterator[str]:
    """The packages of the Python a virtual environment was made from, if it may see them (pyvenv.cfg)."""
    config = _environment_config(root, prefix)
    if config.get("include-system-site-packages", "").lower() == "true" and config.get("home"):
        yield from _packages(root, os.path.dirname(config["home"]), version)


def _users_packages(
    root: Root, prefix: str, version: tuple[int, int] | None, environ: Mapping[str, str]
) -> Iterator[str]:
    """The folder of what `pip install --user` installs, if the interpreter looks there. Source: Python, site."""
    config = _environment_config(root, prefix)
    if (config and config.get("include-system-site-packages", "").lower() != "true") or version is None:
        return
    base = environ.get("PYTHONUSERBASE") or (f"{environ['HOME']}/.local" if environ.get("HOME") else "")
    if base.startswith("/") and not environ.get("PYTHONNOUSERSITE"):
        yield f"{base}/lib/python{version[0]}.{version[1]}/site-packages"


def _packages(root: Root, prefix: str, version: tuple[int, int] | None) -> Iterator[str]:
    if prefix == "/usr":
        yield from (f"{folder}/dist-packages" for folder in _python_folders(root, "/usr/local/lib", version))
    for lib in (f"{prefix}/lib", f"{prefix}/lib64"):
        for folder in _python_folders(root, lib, version):
            yield f"{folder}/site-packages"
            yield f"{folder}/dist-packages"


def _python_folders(root: Root, lib: str, version: tuple[int, int] | None = None) -> Iterator[str]:
    """The folders of Pythons below a lib folder: of this version, if it is known and there, else of all."""
    names = [name for name in sorted(root.names(lib)) if name.startswith("python3")]
    own = "" if version is None else f"python{version[0]}.{version[1]}"
    chosen = (name for name in names if own not in names or name in ("python3", own))
    yield from (f"{lib}/{name}" for name in islice(chosen, MAX_PYTHONS))


def _added_folders(root: Root, folder: str) -> Iterator[str]:
    """The folders that a folder's .pth files add. Source: Python, site: lines that begin with "import" are code."""
    files = islice((name for name in sorted(root.names(folder)) if name.endswith(".pth")), MAX_PTH_LINES)
    for line in islice((line for name in files for line in _pth_lines(root, f"{folder}/{name}")), MAX_PTH_LINES):
        path = os.path.join(folder, line)
        if root.exists(path):
            yield path


def _pth_lines(root: Root, file: str) -> Iterator[str]:
    lines = (line.strip() for line in (root.text(file, limit=MAX_BYTES) or "").splitlines())
    return (line for line in lines if line and not line.startswith(("#", "import ")))
