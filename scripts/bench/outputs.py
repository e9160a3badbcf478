"""Outputs of a model: their tensors, their error against a reference, and the operations that they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from models import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def tensors_of(output: Tensor | Iterable[object]) -> list[Tensor]:
    """The tensors in a module's output (a tensor, sequence or mapping), in fp32; nested containers are ignored.

    A captured module may return a plain dictionary instead of the original's own type.
    """
    if isinstance(output, Tensor):
        return [output.float()]
    values = output.values() if isinstance(output, Mapping) else output
    return [value.float() for value in values if isinstance(value, Tensor)]


def largest_error(result: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest absolute difference of two elements; NaN if one is NaN. Raises: ValueError if shapes differ."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (result, reference)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of shapes {shapes[0]}, the reference has {shapes[1]}")
    differences = [(actual - expected).abs().max() for actual, expected in zip(result, reference, strict=True)]
    return float(torch.stack(differences).max())


def root_mean_square(tensors: Sequence[Tensor]) -> float:
    """Root mean square of all elements of all tensors."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt())


def count_gflop(case: Case) -> float:
    """Multiplications and additions in the matrix products and convolutions of one call, in 1e9.

    SDPBackend.MATH splits attention into matrix products, because the counter ignores its fused CPU kernel.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        case.model(*case.inputs)
    return counter.get_total_flops() / 1e9
