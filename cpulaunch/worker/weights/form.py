"""The packed form of one weight, and the products with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpulaunch.probe.isa import read_cpu_info
from cpulaunch.system.root import Root
from cpulaunch.worker.tensors.access import watch_access
from cpulaunch.worker.tensors.owners import is_held_elsewhere
from cpulaunch.worker.weights.packing import Packed, few_rows, many_rows, pack

Linear = Callable[..., Tensor]
"""torch's own `linear(input, weight, bias)`."""

FEW_ROWS = {"fp32": 4, "bf16": 4, "int8": 8, "int4": 16}
"""Up to this many rows a product is limited by reading the weights, and the kernels for few rows are faster."""

_is_autocast = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype


class Form:
    """A weight of shape [n, k] in one type. `multiply` replaces torch's `linear` with that weight.

    `original` is the program's tensor, which products in its own precision use; it may be a transposed view. `state`:
    the version and the address of the weight, from before its values were read.
    """

    def __init__(self, original: Tensor, kind: str) -> None:
        """Raises: ValueError if the weight cannot be packed in this type."""
        self._packed: Packed = pack(original, kind)  # type: ignore[arg-type]
        self._original = original
        self._most_elements = FEW_ROWS[kind] * original.shape[1]
        self._low: Tensor | None = None
        self._few: tuple[Any, Any, Callable[[Tensor], Tensor] | None] = (self, None, None)
        self.changed = False
        self.state: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        return self._packed.kind

    @property
    def bytes(self) -> int:
        """Memory of the form besides the original, in bytes."""
        own = 0 if self._packed.data.data_ptr() == self._original.data_ptr() else self._packed.bytes
        return own + (0 if self._low is None else self._low.untyped_storage().nbytes())

    def multiply(self, x: Tensor, bias: Tensor | None, plain: Linear) -> Tensor:
        """The product `x @ weight.T + bias`, in the dtype that torch's own product would have."""
        dtype = _autocast_dtype("cpu") if _is_autocast("cpu") else x.dtype
        few = self.few(x, dtype, bias)
        if few is not None:
            return few(x if x.dtype is dtype else x.to(dtype))
        return self._many_rows(x, bias, plain, dtype)

    def few(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Callable[[Tensor], Tensor] | None:
        """The function for few rows if the product of x, computed in the dtype, is one of few rows; None otherwise."""
        is_few = 0 < x.numel() <= self._most_elements and dtype in (torch.float32, torch.bfloat16)
        return self._few_rows(bias) if is_few else None

    def _few_rows(self, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """The function for few rows with this bias, which is kept for the next product with the same one."""
        if bias is not None and bias.is_inference():  # Its changes are not counted.
            return few_rows(self._packed, bias)
        state = None if bias is None else (bias._version, bias.data_ptr())
        prepared = self._few
        if prepared[0] is not bias or prepared[1] != state or self.changed:
            self.changed = False
            if bias is not None and bias.dtype is not torch.float32:  # It is copied.
                watch_access(self, [bias])
                if is_held_elsewhere(bias) or bias.is_shared():
                    return few_rows(self._packed, bias)
            prepared = self._few = (bias, state, few_rows(self._packed, bias))
        return prepared[2]

    def _many_rows(self, x: Tensor, bias: Tensor | None, plain: Linear, dtype: torch.dtype) -> Tensor:
        """The product for many rows: limited by arithmetic, so in bf16 where the CPU multiplies bf16 fast."""
        low = dtype is torch.bfloat16 or (self.kind != "fp32" and bf16_is_fast())
        if not low or dtype is torch.float16:
            return plain(x, self._original, bias)
        weight = many_rows(self._packed) if self.kind in ("int8", "int4") else self.low(torch.bfloat16)
        y = plain(x.to(torch.bfloat16), weight, None if bias is None else bias.to(torch.bfloat16))
        return y if y.dtype is dtype else y.to(dtype)

    def low(self, dtype: torch.dtype) -> Tensor:
        """The weight in bf16 or fp16, cast once."""
        if self.kind == "bf16" and dtype is torch.bfloat16:
            return self._packed.data
        low = self._low
        if low is None or low.dtype is not dtype:
            low = self._low = self._original.to(dtype)
        return low


_fast: list[bool] = []


def bf16_is_fast() -> bool:
    """Whether the CPU multiplies bf16 faster than fp32."""
    if not _fast:
        _fast.append(read_cpu_info(Root()).multiplies_bf16_faster)
    return _fast[0]
