"""Results of a program compared with those of a reference run in eager fp32."""

from __future__ import annotations

from collections.abc import Sequence

from outputs import largest_error, tensors_of
from torch import Tensor

from cases.program import Program

REFERENCE_STEPS = 3
"""Steps whose results are compared; the first ones of a training."""


def results_of(program: Program) -> list[Tensor]:
    """Tensors of the results of the first steps, in fp32. Effect: runs them."""
    steps = REFERENCE_STEPS if program.training else min(REFERENCE_STEPS, program.cycle)
    return [tensor for number in range(steps) for tensor in tensors_of(program.step(number))]


def compared(results: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float, float]:
    """Largest absolute difference of an element, and share of equal choices (0 to 1).

    The choices of a two-dimensional tensor of whole numbers (generated tokens) are its elements, those of another
    tensor the places of the largest values along its last dimension. Raises: ValueError if shapes differ.
    """
    error = largest_error(results, reference)
    equal = [_choices(actual) == _choices(expected) for actual, expected in zip(results, reference, strict=True)]
    return error, sum(float(each.sum()) for each in equal) / sum(each.numel() for each in equal)


def _choices(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2 or (tensor.dim() == 2 and tensor.eq(tensor.round()).all()):
        return tensor
    return tensor.argmax(-1)
