"""The part of oneCCL's C API that this package uses: structures, prototypes, and a communicator.

Source: oneCCL 2022.1, include/oneapi/ccl/v2 (ccl.h, types.h). send and recv are omitted: on host memory they crash the
process (the plugin for CPUs reads the device of a stream that is null).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

from cpulaunch.worker.ccl.oneccl.library import HINT, load, quiet
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ID_BYTES = 4096
UNDEFINED_INT, UNDEFINED_PLUGIN = -(2**31), 0xBAAAAAAE
MAGIC, VERSION = 0xCAFEBEEF, 20211700


class UniqueId(ctypes.Structure):
    """onecclUniqueId: identifies a communicator to the ranks that join it."""

    _fields_ = (("data", ctypes.c_ubyte * ID_BYTES),)


class Config(ctypes.Structure):
    """onecclConfig_t."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("multi_threaded", c_int),
        ("plugin", c_uint),
    )


_BUFFERS = (c_void_p, c_void_p, c_size_t, c_int)  # send, receive, count, type
_END = (c_void_p, c_void_p)  # communicator, stream
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "onecclGetVersion": (POINTER(c_int),),
    "onecclGetUniqueId": (POINTER(UniqueId),),
    "onecclCommInitRankConfig": (POINTER(c_void_p), c_size_t, UniqueId, c_int, POINTER(Config)),
    "onecclCommDestroy": (c_void_p,),
    "onecclAllReduce": (*_BUFFERS, c_int, *_END),
    "onecclReduce": (*_BUFFERS, c_int, c_int, *_END),
    "onecclReduceScatter": (*_BUFFERS, c_int, *_END),
    "onecclBroadcast": (*_BUFFERS, c_int, *_END),
    "onecclAllGather": (*_BUFFERS, *_END),
    "onecclAllToAll": (*_BUFFERS, *_END),
}
"""Function -> types of its arguments. These functions return a result code."""

TEXTS: dict[str, tuple[Any, ...]] = {"onecclGetErrorString": (c_int,), "onecclGetLastError": (c_void_p,)}
"""Function -> types of its arguments. These functions return text."""

_api: list[ctypes.CDLL] = []


def api() -> ctypes.CDLL:
    """The library with its prototypes. Raises: CclError if it cannot be loaded or lacks a function."""
    if not _api:
        _api.append(_with_prototypes(load()))
    return _api[0]


def _with_prototypes(library: ctypes.CDLL) -> ctypes.CDLL:
    for table, result in ((PROTOTYPES, c_int), (TEXTS, c_char_p)):
        for name, arguments in table.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise CclError(f"oneCCL is too old: it has no {name}\n{HINT}") from None
            function.argtypes, function.restype = arguments, result
    return library


def check(code: int, function: str) -> None:
    """Raises: CclError with oneCCL's error text if the result `code` of `function` is an error."""
    if code:
        library = api()
        texts = [library.onecclGetErrorString(code), library.onecclGetLastError(None)]
        message = ": ".join(text.decode(errors="replace") for text in texts if text)
        raise CclError(f"oneCCL failed in {function}: {message} (code {code})")


def version() -> str:
    """oneCCL's version, such as 2022.1."""
    number = c_int()
    check(api().onecclGetVersion(byref(number)), "onecclGetVersion")
    return f"{number.value // 10000}.{number.value // 100 % 100}"


def unique_id() -> bytes:
    """The identity of a new communicator. Effect: this process listens for the ranks that join with this identity."""
    identity = UniqueId()
    library = api()
    with quiet():  # In this call the engine reads its settings, and writes its warning.
        code = library.onecclGetUniqueId(byref(identity))
    check(code, "onecclGetUniqueId")
    return bytes(identity.data)


class Communicator:
    """One rank's communicator of oneCCL. Its methods block.

    The caller ensures that addresses and counts are valid. Raises, from every method: CclError.
    """

    def __init__(self, identity: bytes, *, rank: int, size: int) -> None:
        """Effect: waits until all ranks have created their communicators."""
        self.rank, self.has_failed = rank, False
        undefined = [UNDEFINED_INT] * 4
        config = Config(ctypes.sizeof(Config), MAGIC, VERSION, *undefined, None, UNDEFINED_INT, UNDEFINED_INT)
        config.plugin = UNDEFINED_PLUGIN
        handle = c_void_p()
        code = api().onecclCommInitRankConfig(
            byref(handle), size, UniqueId.from_buffer_copy(identity), rank, byref(config)
        )
        check(code, "onecclCommInitRankConfig")
        self._handle: c_void_p | None = handle
        self._library = api()

    def run(self, function: str, *arguments: int) -> None:
        """Effect: calls onecclFUNCTION with its arguments before the communicator. An error sets `has_failed`."""
        code = getattr(self._library, f"oneccl{function}")(*arguments, self._handle, None)
        if code:
            self.has_failed = True
            check(code, f"oneccl{function}")

    def close(self) -> None:
        """Effect: destroys the communicator; does nothing when called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            check(self._library.onecclCommDestroy(handle), "onecclCommDestroy")
