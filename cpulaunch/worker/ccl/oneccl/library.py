"""oneCCL's shared library: where it is installed, the libraries it needs, and the settings it reads when it is loaded.

LD_LIBRARY_PATH is not needed: this module loads the library and its dependencies by full path, and the dynamic loader
finds libraries that are already loaded by name. Source: dlopen(3), ld.so(8).
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from cpulaunch.records.ccl_defaults import DEFAULTS, TORCH_VARIABLES, network
from cpulaunch.worker.ccl.oneccl.network import interfaces
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DISTRIBUTION = "oneccl"
API, ENGINE, PLUGIN = "libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so"
"""The C API, which loads the plugin for CPUs by name; the plugin calls the engine. Source: oneCCL 2022.1."""

NEEDED = (
    *("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libhwloc.so.15", "libtcm.so.1", "libumf.so.1"),
    *("libur_loader.so.0", "libsycl.so.9", "libsycl.so.8"),
)
"""The engine's dependencies. If a version of oneCCL needs others, the error names them."""

FABRIC = "libfabric.so.1"
"""A library that oneCCL opens by name; pip installs it, and its providers, in oneCCL's folder."""

HINT = "hint: pip install 'cpulaunch[ccl]', or use gloo"


def settings(environ: Mapping[str, str], libraries: str) -> dict[str, str]:
    """Environment variables for oneCCL that `environ` does not set. `libraries` is the folder of its libraries.

    An MPI that the user installed (I_MPI_ROOT) has its own libfabric.
    """
    known = {name: environ[source] for name, source in TORCH_VARIABLES.items() if source in environ}
    if len(known) < len(TORCH_VARIABLES):
        known = {}  # With only one of them oneCCL determines both itself, and warns.
    found = {row.name: row.value for row in (*DEFAULTS, *network(environ, interfaces(environ)))} | known
    if "I_MPI_ROOT" not in environ:
        found["FI_PROVIDER_PATH"], fabric = libraries, os.path.join(libraries, FABRIC)
        if "I_MPI_OFI_LIBRARY" not in environ and os.path.exists(fabric):
            found["CCL_OFI_LIBRARY_PATH"] = fabric
    return {name: value for name, value in found.items() if name not in environ}


def folder(package: str = DISTRIBUTION, prefix: str = sys.prefix) -> str:
    """The folder of oneCCL's libraries. Raises: CclError if oneCCL is not installed or has no C API."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        found = None
    files = (found.files if found else None) or ()
    listed = [os.path.dirname(os.path.realpath(str(file.locate()))) for file in files if file.name == API]
    for candidate in (*listed, os.path.join(prefix, "lib")):
        if os.path.exists(os.path.join(candidate, API)):
            return candidate
    if found:
        raise CclError(f"oneCCL is too old: {found.version} has no {API} (its C API came with 2021.17)\n{HINT}")
    raise CclError(f"oneCCL is not installed: no {API} in {prefix}/lib or in a package named {package}\n{HINT}")


def is_installed() -> bool:
    """Whether oneCCL, with its C API, is installed."""
    try:
        return bool(folder())
    except CclError:
        return False


@cache
def load() -> ctypes.CDLL:
    """oneCCL's C API. Effect: adds its settings to the environment. Raises: CclError if loading fails."""
    libraries = folder()
    os.environ.update(settings(os.environ, libraries))
    api, engine, plugin = (os.path.join(libraries, name) for name in (API, ENGINE, PLUGIN))
    needed = [path for name in NEEDED if os.path.exists(path := os.path.join(libraries, name))]
    for paths in ([api], needed, [engine], [plugin]):
        open_all(paths)
    return ctypes.CDLL(api)


def open_all(paths: Sequence[str]) -> None:
    """Effect: loads the libraries, each after those that it needs, whichever these are in a version of the packages.

    Some find the others by a path of their own and some do not. Raises: CclError with the error of the first that
    cannot be loaded.
    """
    while paths:
        errors: dict[str, OSError] = {}
        for path in paths:
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                errors[path] = error
        if len(errors) == len(paths):
            raise CclError(f"oneCCL cannot be loaded: {errors[paths[0]]}\n{HINT}")
        paths = list(errors)


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Effect: what is written to stdout goes to stderr until the context ends.

    oneCCL writes a warning about its own log level to stdout, where it would corrupt output that is parsed.
    """
    with ExitStack() as after:
        with suppress(OSError):  # A program without stdout or stderr, such as a service.
            kept = os.dup(1)
            after.callback(os.close, kept)
            os.dup2(2, 1)
            after.callback(os.dup2, kept, 1)
        yield
