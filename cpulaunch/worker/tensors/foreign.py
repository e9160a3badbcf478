"""Whether a tensor's memory belongs to another owner than torch, such as a NumPy array, which changes it unnoticed."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

WORDS = 6
"""Words at the beginning of a storage that are compared; none is an address that is unique to a storage's data.

Source: c10/core/StorageImpl.h: virtual table, reference counts, then c10::DataPtr with the address, the function that
frees the memory, and its argument.
"""


def is_foreign(tensor: Tensor) -> bool:
    """Whether torch frees the tensor's memory by asking another owner to: an array, a buffer, a DLPack capsule.

    Memory that torch has read or mapped from a file is its own. Where this cannot be found out, memory that torch
    cannot resize counts as foreign.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        return False
    marks, words = _marks(), _words(tensor)
    return not marks or any(words[index] == word for index, word in marks)


@cache
def _marks() -> tuple[tuple[int, int], ...]:
    """Index and value of the words that storages of foreign memory have in common, and torch's own do not have."""
    buffers = [torch.frombuffer(bytearray(size), dtype=torch.uint8) for size in (64, 128)]
    (one, other), own = map(_words, buffers), _words(torch.empty(1024))
    shared = [(index, word) for index, word in enumerate(one) if word == other[index] and word != own[index]]
    return tuple((index, word) for index, word in shared if 1 << 16 <= word < 1 << 48)  # Addresses, not counts.


def _words(tensor: Tensor) -> list[int]:
    return list((ctypes.c_uint64 * WORDS).from_address(tensor.untyped_storage()._cdata))
