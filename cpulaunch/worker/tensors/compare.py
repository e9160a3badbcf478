"""Comparison of two results up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from cpulaunch.records.record import record


@record
class Tolerance:
    """Largest errors that count as rounding.

    `norm`: 2-norm of the difference, relative to that of the tensor. `element`: difference of one element, relative to
    the largest. `unequal_integers`: share of integers that differ, 0 to 1.
    """

    norm: float
    element: float
    unequal_integers: float


ROUNDING = Tolerance(norm=1e-4, element=1e-3, unequal_integers=0.0)
"""For fp32: sums in another order differ by 1e-6 to 1e-5 in the networks measured, a wrong graph by far more."""

LOW_PRECISION = Tolerance(norm=5e-2, element=1.5e-1, unequal_integers=2e-2)
"""For bf16, with 8 bits of precision: fused operations round less often than eager ones, over all layers."""

NEGLIGIBLE = 1e-6


def largest_error(eager: list[Tensor], graph: list[Tensor], tolerance: Tolerance) -> tuple[float, str | None]:
    """The largest absolute error of any element, and the first reason why the results differ (None: they agree)."""
    if len(eager) != len(graph):
        return float("inf"), f"{len(graph)} tensors instead of {len(eager)}"
    largest = 0.0
    for reference, result in zip(eager, graph, strict=True):
        error, reason = _error(reference, result, tolerance)
        if reason is not None:
            return error, reason
        largest = max(largest, error)
    return largest, None


def _error(reference: Tensor, result: Tensor, tolerance: Tolerance) -> tuple[float, str | None]:
    if (reference.shape, reference.dtype) != (result.shape, result.dtype):
        got, expected = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (result, reference))
        return float("inf"), f"{got} instead of {expected}"
    if reference.numel() == 0:
        return 0.0, None
    if not reference.is_floating_point() and not reference.is_complex():
        share = (reference != result).double().mean().item()
        return share, f"{share:.2%} of the integers differ" if share > tolerance.unequal_integers else None
    return _float_error(reference, result, tolerance)


def _float_error(reference: Tensor, result: Tensor, tolerance: Tolerance) -> tuple[float, str | None]:
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected, got = reference.to(wide), result.to(wide)
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(
        expected[~finite].nan_to_num(), got[~finite].nan_to_num()
    ):
        return float("inf"), "different elements are infinite or NaN"
    difference = (expected - got)[finite].abs()
    if difference.numel() == 0:
        return 0.0, None
    scale, size = expected[finite].abs().max().item(), expected[finite].abs().norm().item()
    error, distance = difference.max().item(), difference.norm().item()
    if error > tolerance.element * scale + NEGLIGIBLE:
        return error, f"an element differs by {error:.2e} (largest value: {scale:.2e})"
    if distance > tolerance.norm * size + NEGLIGIBLE * difference.numel() ** 0.5:
        return error, f"the result differs by {distance / max(size, 1e-300):.1e} of its norm"
    return error, None
