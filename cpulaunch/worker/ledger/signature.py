"""Coarse signatures of calls: cheap to find, and few, even if arguments grow with every call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_function_modes: Any = getattr(torch._C, "_len_torch_function_stack", int)
_no_function_modes: Any = torch._C.DisableTorchFunction

EXACT = 8
"""Dimensions up to this size count exactly, larger ones are rounded up to a power of two."""

MAX_KNOWN = 256
"""Exact shapes whose signature is remembered."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""For each tensor among the arguments, its type, with its device unless that is the CPU, and its rounded shape."""


class Signatures:
    """The signatures of one module's calls: tensors that are arguments themselves; those inside objects do not count.

    A growing sequence has a new signature at each power of two only, and a cache object has none.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Any, Signature] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """The signature of a call. Tensors without a shape (nested ones) do not count.

        The program's torch function modes do not see what is read here.
        """
        if _function_modes():
            with _no_function_modes():
                return self._of(args, kwargs)
        return self._of(args, kwargs)

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        try:
            values = args if not kwargs else (*args, *kwargs.values())
            exact = tuple([(value.dtype, value.device, value.shape) for value in values if isinstance(value, Tensor)])
            known = self._known.get(exact)
            return known if known is not None else self._add(exact)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):
            return ()

    def _add(self, exact: tuple[Any, ...]) -> Signature:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        signature = tuple(map(_part, exact))
        self._known[exact] = signature
        return signature


@lru_cache(MAX_KNOWN)
def _part(argument: tuple[Any, Any, Any]) -> tuple[str, tuple[int, ...]]:
    """The part of the signature for one tensor: often one argument grows, and others stay."""
    dtype, device, shape = argument
    name = str(dtype).removeprefix("torch.")
    return name if device.type == "cpu" else f"{device.type} {name}", tuple(map(rounded, shape))


def rounded(size: int) -> int:
    """The size of a dimension; beyond EXACT, the next power of two."""
    return size if size <= EXACT else 1 << (int(size) - 1).bit_length()


def describe(signature: Signature) -> str:
    """The signature as text, e.g. "float32[1, ≤128, ≤1024]"."""
    return ", ".join(f"{dtype}[{_dimensions(shape)}]" for dtype, shape in signature)


def _dimensions(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) if size <= EXACT else f"≤{size}" for size in shape)
