"""What a model returned: its tensors, how far they are from others, and the operations they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from models import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def tensors_of(output: Tensor | Iterable[object]) -> list[Tensor]:
    """The tensors of a module's output in fp32: of a tensor, a sequence or a mapping; what lies deeper is left out.

    A captured module may return a plain dictionary where the original returned its own type.
    """
    if isinstance(output, Tensor):
        return [output.float()]
    values = output.values() if isinstance(output, Mapping) else output
    return [value.float() for value in values if isinstance(value, Tensor)]


def largest_error(result: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest absolute difference of any element; NaN if there is one. Raises: ValueError if shapes differ."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (result, reference)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of shapes {shapes[0]}, the reference has {shapes[1]}")
    differences = [(ours - theirs).abs().max() for ours, theirs in zip(result, reference, strict=True)]
    return float(torch.stack(differences).max())


def root_mean_square(tensors: Sequence[Tensor]) -> float:
    """Of all elements together."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt())


def count_gflop(case: Case) -> float:
    """Multiplications and additions of one call's matrix products and convolutions, in 1e9.

    Attention is taken apart for that (SDPBackend.MATH): the counter does not know its fused CPU kernel.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        case.model(*case.inputs)
    return counter.get_total_flops() / 1e9
