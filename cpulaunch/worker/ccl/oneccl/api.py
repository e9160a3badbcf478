"""The part of oneCCL's C API that this package uses: its functions, and a communicator.

Source: oneCCL 2022.1, include/oneapi/ccl/v2 (ccl.h, types.h). send and recv are omitted: on host memory they crash the
process (the plugin for CPUs reads the device of a stream that is null).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache

from cpulaunch.worker.ccl.oneccl.library import HINT, load, stdout_on_stderr
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class UniqueId(ctypes.Structure):
    """onecclUniqueId: identifies a communicator to the ranks that join it."""

    _fields_ = (("data", ctypes.c_ubyte * 4096),)


_BUFFERS = (c_void_p, c_void_p, c_size_t, c_int)  # send, receive, count, type
_END = (c_void_p, c_void_p)  # communicator, stream
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "GetVersion": (c_int, POINTER(c_int)),
    "GetUniqueId": (c_int, POINTER(UniqueId)),
    "CommInitRank": (c_int, POINTER(c_void_p), c_size_t, UniqueId, c_int),
    "CommDestroy": (c_int, c_void_p),
    "AllReduce": (c_int, *_BUFFERS, c_int, *_END),
    "Reduce": (c_int, *_BUFFERS, c_int, c_int, *_END),
    "ReduceScatter": (c_int, *_BUFFERS, c_int, *_END),
    "Broadcast": (c_int, *_BUFFERS, c_int, *_END),
    "AllGather": (c_int, *_BUFFERS, *_END),
    "AllToAll": (c_int, *_BUFFERS, *_END),
    "GetErrorString": (c_char_p, c_int),
    "GetLastError": (c_char_p, c_void_p),
}
"""Function, without its prefix oneccl -> the types of its result (a code of an error, or text) and its arguments."""


@cache
def functions() -> dict[str, Any]:
    """The functions by their names in PROTOTYPES. Effect: as load. Raises: CclError if one is missing; as load."""
    library, found = load(), {}
    for name, (result, *arguments) in PROTOTYPES.items():
        try:
            found[name] = getattr(library, f"oneccl{name}")
        except AttributeError:
            raise CclError(f"oneCCL is too old: it has no oneccl{name}\n{HINT}") from None
        found[name].restype, found[name].argtypes = result, arguments
    return found


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
