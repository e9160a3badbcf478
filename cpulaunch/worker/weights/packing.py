"""Weights in a packed type, their exact values, and functions that multiply with them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof
from math import prod
from typing import Literal

import torch
from torch import Tensor

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.owners import own_view
from cpulaunch.worker.weights.library import KINDS, LinearLibrary, PreparedWeights, library

Kind = Literal["fp32", "bf16", "int8", "int4"]

MAX_ROWS = 16
"""Rows of activations up to which the functions of `few_rows` are meant to be used."""
GROUP = 32
"""Columns of int4 weights that share a scale."""
_CHUNK = 1 << 18
"""Weights quantized at a time: they fit into a core's cache."""
_KEPT_SHAPES = 64
_DIVISORS = (-8.0, -8.6, -8.3, -7.7, -7.4, -7.0, 7.0, 7.3, 7.6, 8.0)
"""The weight of largest magnitude in a group, in steps of the scales that are tried; steps go from -8 to 7."""


@record
class Packed:
    """A weight of `rows` x `columns`, row by row, in `bytes` bytes of memory.

    int8: `scales` has one fp32 value for each row. int4: `data` has 16 bytes for each group of 32 columns, the low
    nibbles for the first 16, each the value plus 8; `scales` has a bf16 value for each group.
    """

    kind: Kind
    data: Tensor
    scales: Tensor | None
    rows: int
    columns: int
    bytes: int


def pack(weight: Tensor, kind: Kind) -> Packed:
    """The weight in that type. It shares the memory of a contiguous weight that already has the type.

    Raises: ValueError for a weight that cannot be packed so.
    """
    _check(weight, kind)
    weight = weight.detach() if weight.requires_grad else weight
    scales = None
    if kind == "int8":
        data, scales = _quantize_by_chunks(weight, _to_int8)
    elif kind == "int4":
        data, scales = _quantize_by_chunks(weight, _to_int4)
    else:
        data = weight.to(torch.float32 if kind == "fp32" else torch.bfloat16).contiguous()
    used = data.nbytes + (0 if scales is None else scales.nbytes)
    rows, columns = weight.shape
    return Packed(kind=kind, data=data, scales=scales, rows=rows, columns=columns, bytes=used)


def _check(weight: Tensor, kind: Kind) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown type of weights: {kind}")
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16) or not weight.is_cpu:
        raise ValueError(f"not a matrix of fp32 or bf16 in CPU memory: {tuple(weight.shape)} {weight.dtype}")
    if kind == "int4" and weight.shape[1] % GROUP:
        raise ValueError(f"int4 needs a multiple of {GROUP} columns, not {weight.shape[1]}")
    if kind in ("int8", "int4") and not torch.isfinite(weight).all():
        raise ValueError("a weight is infinite or not a number")


def _quantize_by_chunks(weight: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    parts = [quantize(part.float()) for part in weight.split(rows)]
    data, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return data, scales


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values from -127 to 127, and a scale for each row."""
    rows, columns = weight.shape
    scales = _nonzero(weight.abs().amax(1) / 127 if columns else weight.new_zeros(rows))
    return (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def _to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of values in bytes, and the scale for each group with the smallest squared error of those tried."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scales, values = _best_scales(groups)
    biased = (values + 8).to(torch.uint8)
    low, high = biased[..., : GROUP // 2], biased[..., GROUP // 2 :]
    return (low | high << 4).reshape(rows, columns // 2), scales.squeeze(-1).to(torch.bfloat16)


def _best_scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that bf16 can hold and the values, both in fp32."""
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, values, smallest = _rounded(groups, peaks / _DIVISORS[0])
    for divisor in (*_DIVISORS[1:], None):
        tried = _least_squares(groups, values) if divisor is None else peaks / divisor
        scales, quantized, errors = _rounded(groups, tried)
        is_better = errors < smallest
        best, values = torch.where(is_better, scales, best), torch.where(is_better, quantized, values)
        smallest = torch.where(is_better, errors, smallest)
    return best, values


def _rounded(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales rounded to bf16, the nearest values, and the sum of squared errors of each group."""
    scales = _nonzero(scales.bfloat16().float())
    values = (groups / scales).round().clamp(-8, 7)
    return scales, values, (values * scales - groups).square().sum(-1, keepdim=True)


def _least_squares(groups: Tensor, values: Tensor) -> Tensor:
    """The scales that fit these values best."""
    return (groups * values).sum(-1, keepdim=True) / _nonzero(values.square().sum(-1, keepdim=True))


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight's exact values, computed in fp32 and rounded to the dtype."""
    if packed.scales is None:
        return packed.data.to(dtype)
    if packed.kind == "int8":
        return (packed.data.float() * packed.scales[:, None]).to(dtype)
    pairs = packed.data.view(packed.rows, packed.columns // GROUP, GROUP // 2)
    values = torch.cat([pairs & 15, pairs >> 4], -1).float() - 8
    return (values * packed.scales.float()[..., None]).view(packed.rows, packed.columns).to(dtype)


def few_rows(packed: Packed, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """A function from activations [..., columns] in fp32 or bf16 to products [..., rows] of that type; None without
    the compiled library.

    The product of the leading dimensions should be at most MAX_ROWS; more rows are correct and slow. A bias is read as
    it is now. The function is not differentiable. It raises ValueError for activations of another shape, type or
    device. Threads are torch's at the time of the call, and no result depends on their number.
    """
    loaded = library()
    if loaded is None:
        return None
    return _multiplier(packed, None if bias is None else own_view(bias).float().contiguous(), loaded)


def _multiplier(packed: Packed, bias: Tensor | None, loaded: LinearLibrary) -> Callable[[Tensor], Tensor]:
    prepared = prepare(packed, bias, loaded.instructions)
    multiply, address, threads = loaded.multiply, addressof(prepared), torch.get_num_threads
    shapes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}

    def run(x: Tensor) -> Tensor:
        try:
            count, shape = shapes[x.shape]
            function = multiply[x.dtype]
        except KeyError:
            count, shape = _output_shape(x, packed, shapes)
            function = multiply[x.dtype]
        if not x.is_contiguous():
            x = x.contiguous()
        output = x.new_empty(shape)
        if not x.is_cpu:
            raise ValueError(f"activations in the memory of {x.device}")
        if function(address, x.data_ptr(), output.data_ptr(), count, threads()):
            raise MemoryError("no memory to convert activations from bf16")
        return output

    run.kept_alive = prepared, packed, bias  # type: ignore[attr-defined]
    return run


def prepare(packed: Packed, bias: Tensor | None, instructions: int) -> PreparedWeights:
    """What the library reads for each product; the bias is in fp32 and contiguous. Keep all three alive together."""
    return PreparedWeights(
        data=packed.data.data_ptr(),
        scales=None if packed.scales is None else packed.scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        rows=packed.rows,
        columns=packed.columns,
        kind=KINDS.index(packed.kind),
        instructions=instructions,
    )


def _output_shape(
    x: Tensor, packed: Packed, shapes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]]
) -> tuple[int, tuple[int, ...]]:
    """Rows of the activations, and the shape of the products. Effect: keeps them in `shapes`. Raises: ValueError."""
    if not x.dim() or x.shape[-1] != packed.columns or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"activations of {tuple(x.shape)} {x.dtype} for a weight of {packed.columns} columns")
    leading = tuple(x.shape[:-1])
    if len(shapes) >= _KEPT_SHAPES:
        shapes.clear()
    found = shapes[tuple(x.shape)] = prod(leading), (*leading, packed.rows)
    return found


def many_rows(packed: Packed, out: Tensor | None = None) -> Tensor:
    """The weight for torch's own products with many rows: bf16 if it is bf16, int8 or int4; fp32 as it is.

    `out`, bf16 and contiguous, receives int8 and int4 weights instead of new memory.
    """
    if packed.scales is None:
        return packed.data
    if out is None:
        out = torch.empty(packed.rows, packed.columns, dtype=torch.bfloat16)
    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.numel() != packed.rows * packed.columns:
        raise ValueError(f"weights do not fit into {tuple(out.shape)} {out.dtype}")
    loaded = library()
    if loaded is None:
        return out.copy_(unpack(packed, torch.bfloat16))
    prepared = prepare(packed, None, loaded.instructions)
    loaded.dequantize(addressof(prepared), out.data_ptr(), torch.get_num_threads())
    return out
