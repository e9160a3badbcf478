"""Ranges of the results of operations that add up many elements: sums, means, products, norms, attention."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, sqrt

from torch import Tensor

from cpulaunch.records.record import replace
from cpulaunch.worker.fusion.ranges.elementwise import Rule
from cpulaunch.worker.fusion.ranges.interval import (
    ANYTHING,
    OVERFLOW,
    SMALLEST,
    Range,
    add,
    hull,
    multiply,
    plain,
    scaled,
    symmetric,
)
from cpulaunch.worker.fusion.ranges.operation import UNKNOWN_COUNT, GraphOperation

SUMS: dict[str, Rule] = {}

LARGEST_SQUARED = sqrt(OVERFLOW / UNKNOWN_COUNT)
"""The squares of larger numbers, added up, may overflow."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        SUMS.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule("sum", "cumsum", "embedding_bag")
def _sum(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name == "embedding_bag":
        if not operation.is_none(6):  # The weights of the samples.
            value = multiply(value, plain(operation.range(6)))
        value = hull([value, symmetric(0.0)])  # A bag may be empty.
    both = value.low == -inf and value.high == inf
    return replace(scaled(value, UNKNOWN_COUNT), nan=value.nan or both or scaled(value, UNKNOWN_COUNT).nan)


@_rule(
    *("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d"),
    *("avg_pool3d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d", "grid_sampler"),
    *("_upsample_bilinear2d_aa",),
)
def _mean(operation: GraphOperation) -> Range:
    """Partial sums overflow although a mean does not; infinities times zero, and of both signs, are NaN."""
    value = plain(operation.range(0))
    if value.largest * UNKNOWN_COUNT >= OVERFLOW:
        return ANYTHING
    if operation.name == "grid_sampler":  # A place that is NaN or infinite has weights that are NaN.
        places = plain(operation.range(1))
        if places.nan or places.largest * UNKNOWN_COUNT >= OVERFLOW:
            return ANYTHING
    divisor = operation.constant(6) if operation.name in ("avg_pool2d", "avg_pool3d") else None
    if divisor is not None:  # It is a sum divided by this number.
        return symmetric(value.largest * UNKNOWN_COUNT / max(1, abs(divisor)), nan=value.nan)
    around = value if operation.name == "mean" else hull([value, symmetric(0.0)])
    return _inexact(replace(around, boolean=False))


INEXACT = 1e-3
"""By this part of it, a mean or another weighted sum may be beyond its largest term: it is a sum of rounded numbers."""


def _inexact(value: Range) -> Range:
    """The range of weighted sums of such numbers; zero stays the bound that it is."""
    low, high = value.low - INEXACT * abs(value.low), value.high + INEXACT * abs(value.high)
    return replace(value, low=low, high=high)


@_rule("upsample_bicubic2d", "_upsample_bicubic2d_aa")
def _bicubic(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    return symmetric(4 * value.largest, nan=value.nan or value.may_be_infinite)


ORDERS = (None, 1.0, 2.0, inf)
"""Of norms that are no longer than the sum of all magnitudes."""


@_rule("norm", "linalg_vector_norm", "frobenius_norm")
def _norm(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name != "frobenius_norm" and operation.number(1) not in ORDERS:
        return ANYTHING
    return Range(low=0.0, high=_norm_limit(value.largest), nan=value.nan)


@_rule("cdist")
def _distances(operation: GraphOperation) -> Range:
    one, other = plain(operation.range(0)), plain(operation.range(1))
    if operation.number(2) not in ORDERS:
        return ANYTHING
    overflows = max(one.largest, other.largest) >= LARGEST_SQUARED  # Of many points torch subtracts squares.
    lost = one.nan or other.nan or overflows
    return Range(low=0.0, high=_norm_limit(one.largest + other.largest), nan=lost)


def _norm_limit(largest: float) -> float:
    return inf if largest >= LARGEST_SQUARED else largest * UNKNOWN_COUNT


@_rule("logsumexp")
def _log_of_sum(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    return Range(low=value.low, high=value.high + log(UNKNOWN_COUNT), nan=value.nan or value.may_be_infinite)


@_rule("var", "std", "var_mean", "std_mean")
def _variance(operation: GraphOperation) -> Range:
    """Not of one element, of which it is NaN: see GraphOperation.has_single_variance."""
    value, correction = plain(operation.range(0)), operation.constant(2)
    if type(correction) in (int, float) and correction > 1:  # There may be no more elements than that.
        return ANYTHING
    if operation.has_single_variance or value.nan or value.largest >= LARGEST_SQUARED:
        return ANYTHING
    spread = 2 * value.largest
    largest = spread if "std" in operation.name else spread * spread
    return Range(low=0.0, high=2 * largest)


@_rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def _softmax(operation: GraphOperation) -> Range:
    """Of a row in which all is -infinity it is NaN; the infinities of a mask are where the program wants them."""
    value = operation.range(0)
    nan = value.nan or (value.may_be_infinite and operation.name != "_safe_softmax")
    if "log" in operation.name:
        return Range(low=-2 * value.largest - log(UNKNOWN_COUNT), high=0.0, nan=nan, masked=value.masked)
    return Range(low=0.0, high=1.0, nan=nan)


def product(largest: float, *, others: Range | None = None, nan: bool = False) -> Range:
    """The range of sums of products up to `largest` in total, and of a bias. Overflowing sums may be NaN."""
    total = largest + (0.0 if others is None else others.largest)
    overflows = not total < OVERFLOW / 2
    return symmetric(inf if overflows else total, nan=nan or overflows or (others is not None and others.nan))


def _product_of(one: Range, factor: float, bias: Range | None) -> Range:
    """Infinity times a weight of zero is NaN."""
    return product(_limit(one.largest, factor), others=bias, nan=one.nan or one.may_be_infinite)


def _bias(operation: GraphOperation, index: int) -> Range | None:
    return None if operation.is_none(index) else plain(operation.range(index))


@_rule("linear")
def _linear(operation: GraphOperation) -> Range:
    return _with_weight(operation, gain=operation.gain(1, -1))


@_rule("_convolution", "convolution", "conv1d", "conv2d", "conv3d")
def _convolution(operation: GraphOperation) -> Range:
    weight = operation.constant(1)
    dimensions = weight.dim() if isinstance(weight, Tensor) else 4
    is_transposed = operation.name in ("_convolution", "convolution") and operation.number(6) != 0
    first = 0 if is_transposed else 1
    rest = tuple(index for index in range(dimensions) if index >= 2 or index == first)
    return _with_weight(operation, gain=operation.gain(1, *rest))


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(operation: GraphOperation) -> Range:
    weight = operation.constant(1)
    dimensions = weight.dim() if isinstance(weight, Tensor) else 4
    return _with_weight(operation, gain=operation.gain(1, *(index for index in range(dimensions) if index != 1)))


def _with_weight(operation: GraphOperation, gain: float) -> Range:
    weight = operation.range(1)
    value = plain(operation.range(0))
    result = _product_of(value, gain, _bias(operation, 2))
    return replace(result, nan=result.nan or weight.nan or weight.masked or weight.may_be_infinite)


@_rule("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "outer", "addmv", "__matmul__")
def _matrix_product(operation: GraphOperation) -> Range:
    first = 1 if operation.name.startswith("add") or operation.name == "baddbmm" else 0
    one, other = (plain(operation.range(index)) for index in (first, first + 1))
    constant = operation.constant(first + 1)
    if isinstance(constant, Tensor) and constant.dim() >= 2 and operation.name != "addbmm":  # It sums over matrices.
        largest = _limit(one.largest, operation.gain(first + 1, -2))
    elif isinstance(operation.constant(first), Tensor):
        largest = _limit(other.largest, operation.gain(first, -1))
    else:
        largest = _limit(one.largest * other.largest if one.largest and other.largest else 0.0, UNKNOWN_COUNT)
    nan = one.nan or other.nan or one.may_be_infinite or other.may_be_infinite
    if not first:
        return product(largest, nan=nan)
    beta, alpha = ((operation.number(index) if len(operation.inputs) > index else 1.0) for index in (3, 4))
    if beta is None or alpha is None:
        return ANYTHING
    added = multiply(plain(operation.range(0)), symmetric(abs(beta)))
    return product(_limit(largest, abs(alpha)), others=added, nan=nan)


def _limit(one: float, other: float) -> float:
    return one * other if one and other else 0.0


MAX_FACTORS = 3
"""Of a sum of products whose ranges are known."""


@_rule("einsum", "bilinear", "tensordot")
def _einsum(operation: GraphOperation) -> Range:
    values = hull([plain(each) for each in operation.tensors()])
    if operation.name == "einsum" and operation.inputs[1].node().inputsSize() > MAX_FACTORS:
        return ANYTHING
    return product(_limit(max(values.largest, 1.0) ** 3, UNKNOWN_COUNT), nan=values.nan)


@_rule("scaled_dot_product_attention")
def _attention(operation: GraphOperation) -> Range:
    """torch gives 0 for rows in which all is masked (2.5 and later)."""
    queries, keys, values = (plain(operation.range(index)) for index in range(3))
    scores = product(_limit(queries.largest, keys.largest) * UNKNOWN_COUNT)
    nan = scores.nan or queries.nan or keys.nan or values.nan or values.largest * UNKNOWN_COUNT >= OVERFLOW
    if not operation.is_none(3):
        mask = operation.range(3)
        nan = nan or mask.nan or mask.high == inf
    if not operation.is_none(6):
        nan = nan or not (operation.number(6) is not None and abs(operation.number(6) or 0.0) <= 1)
    return replace(_inexact(hull([values, symmetric(0.0)])), nan=nan)


def _normalized(operation: GraphOperation, count: float, epsilon: float | None, scale: int, shift: int | None) -> Range:
    """The range of (x - mean) / sqrt(variance + epsilon), scaled and shifted, over `count` elements."""
    value = plain(operation.range(0))
    if value.nan or value.largest >= LARGEST_SQUARED or (epsilon is not None and epsilon < SMALLEST):
        return ANYTHING
    result = symmetric(sqrt(count))
    if not operation.is_none(scale):
        result = multiply(result, plain(operation.range(scale)))
    if shift is not None and not operation.is_none(shift):
        result = add(result, plain(operation.range(shift)))
    return result


@_rule("layer_norm", "native_layer_norm")
def _layer_norm(operation: GraphOperation) -> Range:
    return _normalized(operation, operation.count(1), operation.number(4) or 0.0, 2, 3)


@_rule("rms_norm")
def _rms_norm(operation: GraphOperation) -> Range:
    epsilon = None if operation.is_none(3) else operation.number(3) or 0.0
    return _normalized(operation, operation.count(1), epsilon, 2, None)


@_rule("group_norm")
def _group_norm(operation: GraphOperation) -> Range:
    return _normalized(operation, UNKNOWN_COUNT, operation.number(4) or 0.0, 2, 3)


@_rule("batch_norm", "instance_norm")
def _batch_norm(operation: GraphOperation) -> Range:
    """By running statistics, or by those of the input."""
    epsilon = operation.number(7) or 0.0
    if operation.number(5) or operation.is_none(3) or operation.is_none(4):
        return _normalized(operation, UNKNOWN_COUNT, epsilon, 1, 2)
    value, mean, variance = (plain(operation.range(index)) for index in (0, 3, 4))
    if not variance.low + epsilon >= SMALLEST or variance.may_be_infinite:
        return ANYTHING
    deviation = add(value, symmetric(mean.largest))
    result = multiply(deviation, symmetric((variance.low + epsilon) ** -0.5))
    if not operation.is_none(1):
        result = multiply(result, plain(operation.range(1)))
    result = result if operation.is_none(2) else add(result, plain(operation.range(2)))
    return replace(result, nan=result.nan or result.may_be_infinite)  # Weights and means are put together before.


@_rule("lstm", "gru", "rnn_tanh")
def _recurrent(operation: GraphOperation) -> Range:
    """States are means of values of tanh; the cells of an LSTM grow by at most 1 in each step."""
    values = [plain(each) for each in operation.tensors()]
    if any(each.nan for each in values):
        return ANYTHING
    largest = max(each.largest for each in values)
    gates = product(_limit(largest, largest) * UNKNOWN_COUNT)
    return symmetric(1 + UNKNOWN_COUNT * (1 + largest), nan=gates.nan or largest == inf)
