"""Judges results of a captured model against those of plain python, and against fp64 where the two differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 1e-4
"""Norm of a difference, relative to that of the result, up to which two results in fp32 count as equal."""

FACTOR = 4.0
"""A result that differs is right if its distance from fp64 is at most this multiple of plain python's."""


def wrong_reason(results: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor] | None) -> str | None:
    """Why the results are wrong; None if they are those of plain python, or as near to fp64 as those."""
    if len(results) != len(plain):
        return f"{len(results)} tensors instead of {len(plain)}"
    for place, (result, expected) in enumerate(zip(results, plain, strict=True)):
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return f"tensor {place} is {tuple(result.shape)} of {result.dtype}, not {tuple(expected.shape)}"
        error = distance(result, expected)
        if error <= ROUNDING:
            continue
        if exact is None or len(exact) != len(plain) or exact[place].shape != expected.shape:
            return f"tensor {place} differs by {error:.1e}, without a result in fp64 to judge it by"
        allowed = max(ROUNDING, FACTOR * distance(expected, exact[place]))
        if distance(result, exact[place]) > allowed:
            return f"tensor {place} differs by {error:.1e}, at most {allowed:.1e} from fp64 is allowed"
    return None


def distance(result: Tensor, expected: Tensor) -> float:
    """2-norm of the difference relative to that of `expected`; infinite if they are not finite at the same places."""
    first, second = result.double(), expected.double()
    finite = torch.isfinite(second)
    if not torch.equal(torch.isfinite(first), finite):
        return float("inf")
    first, second = first[finite], second[finite]
    if first.numel() == 0:
        return 0.0
    return float((first - second).norm() / second.norm().clamp_min(1e-30)) if not torch.equal(first, second) else 0.0
