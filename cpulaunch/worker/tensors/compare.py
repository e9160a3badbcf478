"""Comparison of two results up to rounding, and of other values exactly."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

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


TWINLESS = frozenset((str, bytes, type(None), type, torch.dtype))
"""Types whose values are equal to no other ones."""


def exact_check(value: Any) -> Callable[[Any], bool] | None:
    """A function that says whether a value of the same type, and equal to this one, is the same; None if each is.

    0.0 is not the same as -0.0, and (1,) not as (1.0,) or (True,).
    """
    if isinstance(value, tuple | list | set | frozenset):
        return _parts_check(value)
    if not isinstance(value, complex) and not (isinstance(value, float) and float.__eq__(value, 0.0)):
        return None
    text = _exact_text(value)
    return lambda now: now is value or _exact_text(now) == text


def _parts_check(value: Any) -> Callable[[Any], bool] | None:
    """`exact_check` of a collection.

    It may be large, and is compared at each call of a module: texts, which take long, only if nothing else decides.
    """
    leaves = list(_leaves(value))
    types = set(map(type, leaves))
    numbers = types - TWINLESS
    if not numbers:
        return None
    is_constant = all(kind.__hash__ is not None for kind in types)
    fixed = value if is_constant and isinstance(value, tuple | frozenset) else object()
    if types == set(map(type, value)) and (numbers in ({int}, {bool}) or (numbers == {float} and 0.0 not in leaves)):
        return lambda now: now is fixed or types.issuperset(map(type, now))
    text, parts = _exact_text(value), tuple(value) if is_constant else ()

    def is_same(now: Any) -> bool:
        are_identical = len(now) == len(parts) and all(map(operator.is_, now, parts))
        return are_identical or _exact_text(now) == text

    return lambda now: now is fixed or is_same(now)


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a collection, and in the tuples and frozen sets in it."""
    for part in value:
        if isinstance(part, tuple | frozenset):
            yield from _leaves(part)
        else:
            yield part


def _exact_text(value: object) -> str:
    """A text that only values of the same types, with the same values in them, have in common."""
    if isinstance(value, float):  # A subclass may have another text.
        return float.__repr__(value)
    return str(sorted(map(repr, value))) if isinstance(value, set | frozenset) else repr(value)
