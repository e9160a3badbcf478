"""oneCCL's shared library: where pip put it, what it needs, and the settings it reads when it is loaded.

Nothing asks for LD_LIBRARY_PATH: the library and what it is linked to are loaded by full path, and the loader finds
what is already there by name. Source: dlopen(3), ld.so(8).
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution

from cpulaunch.records.ccl_defaults import DEFAULTS, TORCH_VARIABLES, network, transport
from cpulaunch.worker.ccl.oneccl import mpi
from cpulaunch.worker.ccl.oneccl.network import interfaces
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DISTRIBUTION = "oneccl"
API, ENGINE, PLUGIN = "libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so"
"""The C API, which loads the plugin for CPUs by name; the plugin calls the engine. All three by oneCCL 2022.1."""

NEEDED = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtcm.so.1", "libhwloc.so.15", "libumf.so.1")
NEEDED_LATER = ("libur_loader.so.0", "libsycl.so.9", "libsycl.so.8")
"""What the engine is linked to, in the order of loading; a version of oneCCL that needs others says so itself."""

TRANSPORT = "CCL_ATL_TRANSPORT"
FABRIC, MPI = "libfabric.so.1", "libmpi.so.12"
"""What oneCCL opens itself, by name: pip puts both, and the fabrics' providers, beside it."""

HINT = "hint: pip install 'cpulaunch[ccl]', or use gloo"


def settings(environ: Mapping[str, str], place: str) -> dict[str, str]:
    """The variables that oneCCL still needs, beside those that are set. `place` is the folder of its libraries."""
    known = {name: environ[source] for name, source in TORCH_VARIABLES.items() if source in environ}
    if len(known) < len(TORCH_VARIABLES):
        known = {}  # One without the other makes oneCCL ask again, and warn.
    between = transport(environ, rank=environ.get("RANK", ""), world_size=environ.get("WORLD_SIZE", ""))
    rows = (*DEFAULTS, *between, *network(environ, between, interfaces(environ)))
    found = {row.name: row.value for row in rows} | known
    found |= _library_paths(environ, place, is_mpi=found[TRANSPORT] == "mpi")
    return {name: value for name, value in found.items() if name not in environ}


def _library_paths(environ: Mapping[str, str], place: str, *, is_mpi: bool) -> dict[str, str]:
    """Where libfabric and MPI are, if they are those that came with oneCCL; the user's MPI knows its own libfabric."""
    root = environ.get("I_MPI_ROOT")
    if root is not None:
        own = [path for folder in ("lib", "lib/release") if os.path.exists(path := os.path.join(root, folder, MPI))]
        return {"CCL_MPI_LIBRARY_PATH": own[0]} if is_mpi and own else {}
    places = {"FI_PROVIDER_PATH": place}
    if "I_MPI_OFI_LIBRARY" not in environ and os.path.exists(os.path.join(place, FABRIC)):
        places["CCL_OFI_LIBRARY_PATH"] = os.path.join(place, FABRIC)
    if is_mpi and os.path.exists(os.path.join(place, MPI)):
        places |= {"I_MPI_ROOT": os.path.dirname(place), "CCL_MPI_LIBRARY_PATH": os.path.join(place, MPI)}
    return places


def folder(package: str = DISTRIBUTION, prefix: str = sys.prefix) -> str:
    """Where oneCCL's libraries are. Raises: CclError if it is not installed, or is a version without the C API."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        found = None
    files = (found.files if found else None) or ()
    places = [os.path.dirname(os.path.realpath(str(file.locate()))) for file in files if file.name == API]
    for place in (*places, os.path.join(prefix, "lib")):
        if os.path.exists(os.path.join(place, API)):
            return place
    if found:
        raise CclError(f"oneCCL is too old: {found.version} has no {API} (its C API came with 2021.17)\n{HINT}")
    raise CclError(f"oneCCL is not installed: no {API} in {prefix}/lib or in a package named {package}\n{HINT}")


_loaded: list[ctypes.CDLL] = []


def load() -> ctypes.CDLL:
    """oneCCL's C API, loaded once. Effect: its settings are in the environment. Raises: CclError."""
    if not _loaded:
        place = folder()
        os.environ.update(settings(os.environ, place))
        _loaded.append(_load(place))
        if os.environ[TRANSPORT] == "mpi":
            mpi.finalize_at_exit(os.environ.get("CCL_MPI_LIBRARY_PATH", MPI))
    return _loaded[0]


def _load(place: str) -> ctypes.CDLL:
    api = _open(place, API)
    for name in (*NEEDED, *NEEDED_LATER):
        if os.path.exists(os.path.join(place, name)):
            _open(place, name)
    for name in (ENGINE, PLUGIN):
        _open(place, name)
    return api


NOISE = b"|CCL_WARN| value of CCL_LOG_LEVEL changed"
"""oneCCL says on stdout that it was told to say less; programs whose output is read could not have that."""


@contextmanager
def quiet() -> Iterator[None]:
    """Effect: what is written to stdout within it appears afterwards, without oneCCL's line."""
    try:
        kept = os.dup(1)
    except OSError:  # A program without stdout, such as a service.
        yield
        return
    place = os.memfd_create("cpulaunch-stdout")
    os.dup2(place, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        with os.fdopen(place, "rb") as written:
            written.seek(0)
            for line in written:
                if NOISE not in line:
                    os.write(1, line)


def _open(place: str, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.path.join(place, name), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise CclError(f"oneCCL cannot be loaded: {error}\n{HINT}") from None
