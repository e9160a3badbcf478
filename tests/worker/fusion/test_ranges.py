"""What is said of the values of a graph holds for values at the ends of the ranges of its inputs, and in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor  # noqa: E402

from cpulaunch.worker.fusion.portable import graph_of, portable  # noqa: E402
from cpulaunch.worker.fusion.ranges.analysis import Analysis  # noqa: E402
from cpulaunch.worker.fusion.ranges.interval import Range  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = (4, 8)
BOUNDS = (-inf, -3e38, -1e30, -1e9, -90.0, -2.0, -1.0, 0.0, 1e-30, 0.5, 1.0, 2.0, 90.0, 1e9, 1e30, 3e38, inf)
RANGES = [
    *[(low, high) for low, high in pairwise(BOUNDS)],
    *[(-1.0, 1.0), (-1e9, 1e9), (0.0, 1e30), (-1e30, 1e30), (0.5, 3e38), (-3e38, 3e38), (0.0, 1.0), (-2.0, 90.0)],
]

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(1))


def unary(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return function(x)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: partial(unary, getattr(torch, name))
        for name in (
            *("neg", "abs", "square", "reciprocal", "sqrt", "rsqrt", "log", "log2", "log10", "log1p", "exp", "expm1"),
            *("exp2", "sinh", "cosh", "sigmoid", "tanh", "erf", "sign", "atan", "sin", "cos", "relu", "floor", "ceil"),
            *("round", "trunc", "frac", "selu", "celu", "isnan", "nan_to_num", "triu", "logical_not", "asin", "lgamma"),
        )
    },
    **{
        name: partial(unary, getattr(F, name))
        for name in (
            *("relu6", "hardtanh", "leaky_relu", "elu", "gelu", "silu", "mish", "hardswish", "softplus", "logsigmoid"),
            *("hardsigmoid", "softsign", "normalize"),
        )
    },
    **{
        name: getattr(torch, name)
        for name in (
            *("add", "sub", "rsub", "mul", "div", "floor_divide", "fmod", "remainder", "maximum", "minimum", "pow"),
            *("atan2",),
        )
    },
    "add_alpha": lambda x, y: torch.add(x, y, alpha=-2.5),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=-2.0),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "clamp": lambda x, y: x.clamp(-3.0, 1.5),
    "clamp_min": lambda x, y: x.clamp(min=0.25),
    "clamp_max": lambda x, y: x.clamp(max=0.25),
    "clamp_by_tensors": lambda x, y: torch.clamp(x, min=y),
    "threshold": lambda x, y: F.threshold(x, 0.5, -7.0),
    "prelu": lambda x, y: F.prelu(x, torch.tensor([-3.0])),
    "elu_alpha": lambda x, y: F.elu(x, 3.0),
    "power_3": lambda x, y: x**3,
    "power_4": lambda x, y: x**4,
    "power_infinite": lambda x, y: x**inf,
    "round_to_hundredths": lambda x, y: x.round(decimals=2),
    "round_to_hundreds": lambda x, y: x.round(decimals=-2),
    "power_half": lambda x, y: x**0.5,
    "power_of_number": lambda x, y: 10.0**x,
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_infinite": lambda x, y: torch.where(x > y, x, -inf).softmax(-1),
    "mask": lambda x, y: x.masked_fill(torch.eye(4, 8) > 0, -inf).softmax(-1),
    "mask_plus": lambda x, y: (x + torch.zeros(4, 8).masked_fill(torch.eye(4, 8) > 0, -inf)) * y,
    "mask_indexed": lambda x, y: torch.tensor([0.0, -inf])[(x > y).long()].softmax(-1),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "stable_exp": lambda x, y: (x - x.amax(-1, keepdim=True)).exp(),
    "stable_exp_of_columns": lambda x, y: (x - x.amax(0)).exp(),
    "exp_of_rows_without_the_maxima_of_others": lambda x, y: (x[:, :4] - x[:, :4].amax(-1)).exp(),
    "sum": lambda x, y: x.sum(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "mean": lambda x, y: x.mean(-1),
    "amax": lambda x, y: x.amax(-1),
    "max": lambda x, y: x.max(-1)[0],
    "max_of_two": lambda x, y: torch.max(x, y),
    "min_of_two": lambda x, y: torch.min(x, y),
    "norm": lambda x, y: x.norm(dim=-1),
    "norm_3": lambda x, y: x.norm(p=3, dim=-1),
    "norm_half": lambda x, y: x.norm(p=0.5, dim=-1),
    "cdist": lambda x, y: torch.cdist(x, y),
    "cdist_of_many": lambda x, y: torch.cdist(x.repeat(8, 1), y.repeat(8, 1)),
    "var": lambda x, y: x.var(-1),
    "var_of_two_corrected": lambda x, y: x[:, :2].var(-1, correction=2),
    "std": lambda x, y: x.std(-1),
    "linear": lambda x, y: F.linear(x, WEIGHT, WEIGHT[0]),
    "matmul": lambda x, y: x @ y.T,
    "matmul_constant": lambda x, y: x @ WEIGHT,
    "matmul_from_left": lambda x, y: WEIGHT[:, :4] @ x,
    "addmm": lambda x, y: torch.addmm(y, x, WEIGHT, beta=-0.5, alpha=2.0),
    "bmm": lambda x, y: torch.bmm(x[None], y.T[None]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "einsum_of_four": lambda x, y: torch.einsum("ij,ij,ij,ij->i", x, y, x, y),
    "conv2d": lambda x, y: F.conv2d(x.reshape(1, 2, 4, 4), IMAGES, padding=1),
    "conv_transpose2d": lambda x, y: F.conv_transpose2d(x.reshape(1, 2, 4, 4), IMAGES.transpose(0, 1)),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "layer_norm": lambda x, y: F.layer_norm(x, (8,), WEIGHT[0], WEIGHT[1]),
    "layer_norm_without_epsilon": lambda x, y: F.layer_norm(x, (8,), eps=0.0),
    "rms_norm": lambda x, y: F.rms_norm(x, (8,), WEIGHT[0]),
    "rms_of_other_rows": lambda x, y: x[:, :4] * torch.rsqrt(x[:, :4].pow(2).mean(-1) + 1e-30),
    "rms_norm_by_hand": lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "group_norm": lambda x, y: F.group_norm(x, 2, WEIGHT[0], WEIGHT[1]),
    "batch_norm": lambda x, y: F.batch_norm(x, WEIGHT[0], WEIGHT[1].abs(), WEIGHT[2], WEIGHT[3]),
    "max_pool2d": lambda x, y: F.max_pool2d(x.reshape(1, 2, 4, 4), 2),
    "avg_pool2d": lambda x, y: F.avg_pool2d(x.reshape(1, 2, 4, 4), 2, padding=1),
    "adaptive_pool": lambda x, y: F.adaptive_avg_pool2d(x.reshape(1, 2, 4, 4), 1),
    "bilinear": lambda x, y: F.interpolate(x.reshape(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda x, y: F.grid_sample(torch.ones(1, 1, 4, 4), x.reshape(1, 4, 4, 2), align_corners=False),
    "bicubic": lambda x, y: F.interpolate(x.reshape(1, 2, 4, 4), scale_factor=2.0, mode="bicubic"),
    "pad": lambda x, y: F.pad(x, (1, 1), value=-7.0),
    "cat": lambda x, y: torch.cat([x, y]).reshape(-1)[3:],
    "split": lambda x, y: x.split(3, -1)[1],
    "half": lambda x, y: x.half().float(),
    "whole": lambda x, y: x.clamp(-1e6, 1e6).long() * 2.0,
    "inverted": lambda x, y: 1.0 - (x > y).float(),
    "not": lambda x, y: (~(x > y)).cumsum(-1, dtype=torch.float32),
    "scatter": lambda x, y: torch.zeros(4, 8).scatter(-1, torch.zeros(4, 1, dtype=torch.long), x),
    "scatter_sum": lambda x, y: torch.ones(4, 8).scatter(-1, torch.zeros(4, 2).long(), x[:, :2], reduce="add"),
    "index_put": lambda x, y: x.index_put((x > y,), torch.tensor(4.0)),
    "root_of_difference": lambda x, y: torch.sqrt(x * x - y * y),
    "gated": lambda x, y: x * torch.sigmoid(y),
    "numbers_for_nan": lambda x, y: torch.nan_to_num(x / y, nan=0.0, posinf=0.0, neginf=0.0),
    "other_numbers_for_nan": lambda x, y: torch.nan_to_num(x.log(), nan=5.0, posinf=7.0, neginf=-7.0),
    "fmax_beside_nan": lambda x, y: torch.fmax(x.sqrt(), y),
    "fmin_beside_nan": lambda x, y: torch.fmin(y, x.sqrt()),
    "softplus_from_below_zero": lambda x, y: F.softplus(x, threshold=-5.0),
    "softplus_to_a_thousand": lambda x, y: F.softplus(x, threshold=1000.0),
    "mean_beside_variance": lambda x, y: torch.var_mean(x, -1)[1],
    "variance_beside_mean": lambda x, y: torch.var_mean(x, -1)[0],
    "avg_pool_with_divisor": lambda x, y: F.avg_pool2d(x.reshape(1, 2, 4, 4), 2, divisor_override=1),
    "avg_pool_with_negative_divisor": lambda x, y: F.avg_pool2d(x.reshape(1, 2, 4, 4), 2, divisor_override=-2),
    "avg_pool_of_roots": lambda x, y: F.avg_pool2d(x.sqrt().reshape(1, 2, 4, 4), 2, divisor_override=2),
    "blocks_on_a_diagonal": lambda x, y: torch.block_diag(x, y),
    "lowest_in_bf16": lambda x, y: (x * 0 - 3.4e38).to(torch.bfloat16).float(),
    "empty_bag": lambda x, y: F.embedding_bag(torch.tensor([0, 1]), x, offsets=torch.tensor([0, 2])),
    "sum_of_matrices": lambda x, y: torch.addbmm(torch.ones(2, 2), x.reshape(4, 2, 4), torch.ones(4, 4, 2)),
    "weights_of_zero": lambda x, y: F.linear(x.exp(), torch.zeros(3, 8)),
    "matrix_of_zero": lambda x, y: x.exp() @ torch.zeros(8, 3),
    "images_of_zero": lambda x, y: F.conv2d(x.exp().reshape(1, 2, 4, 4), torch.zeros(3, 2, 3, 3)),
    "log_beside_one": lambda x, y: torch.log(1 - x.clamp(1e-8, 1 - 1e-8)),
    "log_beside_one_in_bf16": lambda x, y: torch.log(1 - x.bfloat16().clamp(max=1 - 1e-5)).float(),
    "tiny_divisor": lambda x, y: x / 1e-300,
    "root_of_tiny_numbers": lambda x, y: torch.sqrt(x * 3e-38),
    "log_of_tiny_numbers": lambda x, y: torch.log(x.clamp(1e-30, 1.0) * 1e-12),
    "as_boolean": lambda x, y: torch.log(x.type_as(torch.ones(1, dtype=torch.bool)) + 0.5),
    "as_another": lambda x, y: x.clamp(-1e6, 1e6).type_as((y > 0).long()) * 1.0,
    "as_narrow_integers": lambda x, y: x.clamp(-1e6, 1e6).long().to(torch.int8) * 1.0,
    "rounded_maximum": lambda x, y: torch.sqrt(x.bfloat16().float().amax() - x),
    "difference_to_rounded_maximum": lambda x, y: x - x.bfloat16().amax(),
}


def values(low: float, high: float, seed: int) -> Tensor:
    """Numbers in the range, with both of its ends."""
    ends = [min(max(bound, -3.4e38), 3.4e38) for bound in (low, high)]
    generator = torch.Generator().manual_seed(seed)
    value = ends[0] + torch.rand(SHAPE, generator=generator) * (ends[1] / 2 - ends[0] / 2) * 2
    chosen = torch.randint(0, 4, SHAPE, generator=generator)
    value = torch.where(chosen == 0, torch.tensor(low), torch.where(chosen == 1, torch.tensor(high), value))
    if low <= 0 <= high:
        value[chosen == 2] = 0.0
    return torch.full(SHAPE, low) if seed == 0 else value.clamp(low, high)


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_results_are_in_the_range(name: str) -> None:
    operation = OPERATIONS[name]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        given = (torch.rand(SHAPE), torch.rand(SHAPE))
        graph = graph_of(portable(torch.jit.trace(lambda x, y: (operation(x, y),), given, check_trace=False)))
    analysis = Analysis(graph)
    result = next(iter(graph.outputs())).node().inputsAt(0).debugName()
    for place, one in enumerate(RANGES):
        for other in RANGES[place % 11 :: 11]:
            found = analysis.findings([Range(low=low, high=high) for low, high in (one, other)]).ranges[result]
            if found.nan and found.low == -inf and found.high == inf:
                continue
            for seed in range(2):
                check(found, operation(values(*one, seed), values(*other, seed + 1)), f"{name} {one} {other}")


def check(found: Range, result: Tensor, title: str) -> None:
    """Raises: AssertionError if a result is outside of the range, up to rounding."""
    result = result.double()
    assert found.nan or not result.isnan().any(), f"{title}: NaN is not expected: {found}"
    numbers = result[~result.isnan() & (result.isfinite() if found.masked else True)]
    if numbers.numel():
        slack = 1e-5 * max(abs(bound) for bound in (found.low, found.high, 1e-30) if abs(bound) < inf) + 1e-36
        assert numbers.min() >= found.low - slack, f"{title}: {numbers.min()} is below {found}"
        assert numbers.max() <= found.high + slack, f"{title}: {numbers.max()} is above {found}"
