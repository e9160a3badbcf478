"""oneCCL's C API as this package uses it: prototypes, numbers of types and operations, and one communicator.

Source: oneCCL 2022.1, include/oneapi/ccl/v2 (ccl.h, types.h). Its send and recv are left out: on host memory they end
the process (the plugin for CPUs asks a stream that is not there for its device).
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
    """onecclUniqueId: what the ranks of a communicator find one another by."""

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
"""Function -> its arguments' types; each returns a result code."""

TEXTS: dict[str, tuple[Any, ...]] = {"onecclGetErrorString": (c_int,), "onecclGetLastError": (c_void_p,)}
"""Function -> its arguments' types; each returns a text."""

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


def check(code: int, what: str) -> None:
    """Raises: CclError with oneCCL's own text if the code says that something went wrong."""
    if code:
        library = api()
        texts = [library.onecclGetErrorString(code), library.onecclGetLastError(None)]
        said = ": ".join(text.decode(errors="replace") for text in texts if text)
        raise CclError(f"oneCCL failed in {what}: {said} (code {code})")


def version() -> str:
    """oneCCL's version, such as 2022.1."""
    number = c_int()
    check(api().onecclGetVersion(byref(number)), "onecclGetVersion")
    return f"{number.value // 10000}.{number.value // 100 % 100}"


def unique_id() -> bytes:
    """A new communicator's identity. Effect: this process listens for the ranks that hold it."""
    identity = UniqueId()
    library = api()
    with quiet():  # The first call in which the engine reads its settings.
        code = library.onecclGetUniqueId(byref(identity))
    check(code, "onecclGetUniqueId")
    return bytes(identity.data)


class Communicator:
    """One rank's end of a communicator. Its methods block; addresses and counts are the caller's responsibility."""

    def __init__(self, identity: bytes, *, rank: int, size: int) -> None:
        """Effect: waits until all ranks are here. Raises: CclError."""
        self.rank, self.has_failed = rank, False
        undefined = [UNDEFINED_INT] * 4
        config = Config(ctypes.sizeof(Config), MAGIC, VERSION, *undefined, None, UNDEFINED_INT, UNDEFINED_INT)
        config.plugin = UNDEFINED_PLUGIN
        handle = c_void_p()
        made = api().onecclCommInitRankConfig(
            byref(handle), size, UniqueId.from_buffer_copy(identity), rank, byref(config)
        )
        check(made, "onecclCommInitRankConfig")
        self._handle: c_void_p | None = handle
        self._library = api()

    def all_reduce(self, address: int, count: int, kind: int, operation: int) -> None:
        """Effect: every rank's elements are the operation over all ranks' elements."""
        code = self._library.onecclAllReduce(address, address, count, kind, operation, self._handle, None)
        if code:
            self._check(code, "onecclAllReduce")

    def reduce(self, address: int, count: int, kind: int, *, operation: int, root: int) -> None:
        """Effect: the root's elements are the operation over all ranks' elements."""
        self._check(
            self._library.onecclReduce(address, address, count, kind, operation, root, self._handle, None),
            "onecclReduce",
        )

    def reduce_scatter(self, source: int, target: int, *, count: int, kind: int, operation: int) -> None:
        """Effect: `count` elements at the target are this rank's part of the operation over all ranks' sources."""
        self._check(
            self._library.onecclReduceScatter(source, target, count, kind, operation, self._handle, None),
            "onecclReduceScatter",
        )

    def broadcast(self, address: int, count: int, kind: int, *, root: int) -> None:
        """Effect: every rank has the root's elements."""
        self._check(
            self._library.onecclBroadcast(address, address, count, kind, root, self._handle, None), "onecclBroadcast"
        )

    def all_gather(self, source: int, target: int, count: int, kind: int) -> None:
        """Effect: the target holds all ranks' `count` elements, in the order of the ranks."""
        self._check(self._library.onecclAllGather(source, target, count, kind, self._handle, None), "onecclAllGather")

    def all_to_all(self, source: int, target: int, count: int, kind: int) -> None:
        """Effect: the target holds what all ranks have for this one, `count` elements of each."""
        self._check(self._library.onecclAllToAll(source, target, count, kind, self._handle, None), "onecclAllToAll")

    def _check(self, code: int, what: str) -> None:
        """Raises: CclError if the code says that something went wrong, as it will from now on."""
        self.has_failed = self.has_failed or bool(code)
        check(code, what)

    def close(self) -> None:
        """Effect: the communicator is gone; nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is not None:
            check(self._library.onecclCommDestroy(handle), "onecclCommDestroy")
