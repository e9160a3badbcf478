"""oneCCL's shared library: where it is, what it needs and reads when it is loaded, and the part of its C API in use.

LD_LIBRARY_PATH is not needed: this module loads the library and its dependencies by full path, and the dynamic loader
finds libraries that are already loaded by name. send and recv are omitted: on host memory they crash the process (the
plugin for CPUs reads the device of a stream that is null).
Sources: dlopen(3), ld.so(8); oneCCL 2022.1, include/oneapi/ccl/v2 (ccl.h, types.h).
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from cpulaunch.records.ccl_defaults import DEFAULTS, TORCH_VARIABLES, network
from cpulaunch.worker.ccl.oneccl.network import interfaces
from cpulaunch.worker.ccl.wire.errors import CclError

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


class UniqueId(ctypes.Structure):
    """onecclUniqueId: identifies a communicator to the ranks that join it."""

    _fields_ = (("data", ctypes.c_ubyte * 4096),)


_BUFFERS = (c_void_p, c_void_p, c_size_t, c_int)  # send, receive, count, type
_END = (c_void_p, c_void_p)  # communicator, stream
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "GetVersion": (POINTER(c_int),),
    "GetUniqueId": (POINTER(UniqueId),),
    "CommInitRank": (POINTER(c_void_p), c_size_t, UniqueId, c_int),
    "CommDestroy": (c_void_p,),
    "AllReduce": (*_BUFFERS, c_int, *_END),
    "Reduce": (*_BUFFERS, c_int, c_int, *_END),
    "ReduceScatter": (*_BUFFERS, c_int, *_END),
    **dict.fromkeys(("AllGather", "AllToAll"), (*_BUFFERS, *_END)),
    "Broadcast": (*_BUFFERS, c_int, *_END),
    "GetErrorString": (c_int,),
    "GetLastError": (c_void_p,),
}
"""Function, without its prefix oneccl -> the types of its arguments. The results are texts or codes of errors."""


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
    with suppress(CclError):
        return bool(folder())
    return False


@cache
def functions() -> dict[str, Any]:
    """The functions of oneCCL's C API by their names in PROTOTYPES.

    Effect: loads oneCCL; adds its settings to the environment. Raises: CclError if loading fails.
    """
    libraries = folder()
    os.environ.update(settings(os.environ, libraries))
    api, engine, plugin = (os.path.join(libraries, name) for name in (API, ENGINE, PLUGIN))
    needed = [path for name in NEEDED if os.path.exists(path := os.path.join(libraries, name))]
    for paths in ([api], needed, [engine], [plugin]):
        open_all(paths)
    library, found = ctypes.CDLL(api), {}
    for name, arguments in PROTOTYPES.items():
        try:
            found[name] = getattr(library, f"oneccl{name}")
        except AttributeError:
            raise CclError(f"oneCCL is too old: it has no oneccl{name}\n{HINT}") from None
        found[name].argtypes, found[name].restype = arguments, c_char_p if "Error" in name else c_int
    return found


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


def call(name: str, *arguments: Any) -> None:
    """Effect: calls a function. Raises: CclError with oneCCL's text if the result is an error."""
    code = functions()[name](*arguments)
    if code:
        texts = [functions()["GetErrorString"](code), functions()["GetLastError"](None)]
        message = ": ".join(text.decode(errors="replace") for text in texts if text)
        raise CclError(f"oneCCL failed in oneccl{name}: {message} (code {code})")


def version() -> str:
    """oneCCL's version, such as 2022.1. Effect: loads oneCCL. Raises: CclError if that fails."""
    number = c_int()
    call("GetVersion", byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}"


def unique_id() -> bytes:
    """The identity of a new communicator. Effect: this process listens for the ranks that join with this identity."""
    identity = UniqueId()
    with stdout_on_stderr():
        call("GetUniqueId", byref(identity))
    return bytes(identity.data)


class Communicator:
    """One rank's communicator of oneCCL. Its methods block.

    The caller ensures that addresses and counts are valid. Raises, from every method: CclError.
    """

    def __init__(self, identity: bytes, *, rank: int, size: int) -> None:
        """Effect: waits until all ranks have created their communicators."""
        self.rank, self.has_failed = rank, False
        self._handle: c_void_p | None = c_void_p()
        call("CommInitRank", byref(self._handle), size, UniqueId.from_buffer_copy(identity), rank)

    def run(self, name: str, *arguments: int) -> None:
        """Effect: calls a function with its arguments before the communicator. An error sets `has_failed`."""
        try:
            call(name, *arguments, self._handle, None)
        except CclError:
            self.has_failed = True
            raise

    def close(self) -> None:
        """Effect: destroys the communicator; does nothing when called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            call("CommDestroy", handle)
