"""The torch of the worker's environment, from its files; it is never imported here."""

from __future__ import annotations

import os
import sys

from cpulaunch.probe.software.elf import exports
from cpulaunch.records.host import EXTENSIONS, Torch
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OPENMP = ("libgomp", "libiomp5", "libomp")
MKL_DISPATCH = "mkl_serv_intel_cpu_true"
PLUGIN, PLUGIN_GROUP = "cpulaunch-", "[torch.backends]"
METADATA = (".dist-info", ".egg-info")


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


def read_torch(root: Root, interpreter: str | None, prefix: str | None) -> Torch | None:
    """The torch that this interpreter would import; None if it has none."""
    folders = tuple(_site_folders(root, interpreter, prefix))
    for folder in folders:
        version = _version(root.text(f"{folder}/torch/version.py") or "")
        if version is not None:
            library = f"{folder}/torch/lib/libtorch_cpu.so"
            return Torch(
                version=version,
                path=f"{folder}/torch",
                bundled_openmp=_bundled_openmp(root, folder),
                mkl_dispatch_symbol=root.exists(library) and exports(root.host_path(library), MKL_DISPATCH),
                extensions=tuple(name for name in EXTENSIONS if any(root.exists(f"{at}/{name}") for at in folders)),
                plugin=any(_has_plugin(root, at) for at in (folder, *folders)),
            )
    return None


def _has_plugin(root: Root, folder: str) -> bool:
    """Whether a folder's cpulaunch, if it has one, tells torch of its plugin.

    Source: Core metadata specifications, "Recording installed projects"; entry points specification.
    """
    return any(
        PLUGIN_GROUP in (root.text(f"{folder}/{name}/entry_points.txt") or "")
        for name in root.names(folder)
        if name.startswith(PLUGIN) and name.endswith(METADATA)
    )


def _version(text: str) -> str | None:
    """The literal that version.py assigns to __version__."""
    for line in text.splitlines():
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


def _site_folders(root: Root, interpreter: str | None, prefix: str | None) -> Iterator[str]:
    """Folders that `import torch` would look in, in order; this process's own if it is the same interpreter."""
    if root.live and interpreter == sys.executable:
        yield from (path for path in sys.path if os.path.isabs(path))
    elif prefix is not None:
        yield from _packages(root, prefix)
        yield from _base_packages(root, prefix)


def _base_packages(root: Root, prefix: str) -> Iterator[str]:
    """The packages of the Python a virtual environment was made from, if it may see them (pyvenv.cfg)."""
    text = root.text(f"{prefix}/pyvenv.cfg") or ""
    pairs = (line.partition("=") for line in text.splitlines())
    config = {key.strip().lower(): value.strip() for key, _, value in pairs}
    if config.get("include-system-site-packages", "").lower() == "true" and config.get("home"):
        yield from _packages(root, os.path.dirname(config["home"]))


def _packages(root: Root, prefix: str) -> Iterator[str]:
    if prefix == "/usr":
        yield from (f"{folder}/dist-packages" for folder in _python_folders(root, "/usr/local/lib"))
    for lib in (f"{prefix}/lib", f"{prefix}/lib64"):
        for folder in _python_folders(root, lib):
            yield f"{folder}/site-packages"
            yield f"{folder}/dist-packages"


def _python_folders(root: Root, lib: str) -> Iterator[str]:
    yield from (f"{lib}/{name}" for name in sorted(root.names(lib)) if name.startswith("python3"))
