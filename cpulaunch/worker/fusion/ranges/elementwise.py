"""Ranges of the results of operations on single elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

from cpulaunch.records.record import replace
from cpulaunch.worker.fusion.ranges.interval import (
    ANYTHING,
    BOOLEAN,
    EXP_OVERFLOW,
    OVERFLOW,
    WHOLE,
    Range,
    absolute,
    add,
    clamped,
    divide,
    hull,
    increasing,
    multiply,
    negative,
    plain,
    reciprocal,
    rounded,
    square,
    symmetric,
)
from cpulaunch.worker.fusion.ranges.operation import GraphOperation, is_subtracted_maximum, root_mean_square_limit

Rule = Callable[[GraphOperation], Range]
"""The range of an operation's results."""

NEGATIVE_PART = 0.4
"""No smooth activation has smaller values for negative numbers: silu has -0.28, mish -0.31, hardswish -0.38."""

ELEMENTWISE: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        ELEMENTWISE.update(dict.fromkeys(names, rule))
        return rule

    return register


def _scale(operation: GraphOperation) -> Range:
    """The range of the number by which the second term of a sum is multiplied."""
    return operation.range(2) if len(operation.inputs) > 2 else Range(low=1.0, high=1.0)


def _times(value: Range, factor: Range) -> Range:
    """The product; a factor of 1 leaves the infinities of a mask where they are."""
    return value if factor.low == factor.high == 1 else multiply(plain(value), factor)


@_rule("add", "__iadd__")
def _add(operation: GraphOperation) -> Range:
    return add(operation.range(0), _times(operation.range(1), _scale(operation)))


@_rule("sub", "__isub__")
def _subtract(operation: GraphOperation) -> Range:
    result = add(operation.range(0), negative(_times(operation.range(1), _scale(operation))))
    return replace(result, high=min(result.high, 0.0)) if is_subtracted_maximum(operation) else result


@_rule("rsub")
def _subtract_from(operation: GraphOperation) -> Range:
    return add(operation.range(1), negative(_times(operation.range(0), _scale(operation))))


@_rule("mul", "__imul__")
def _multiply(operation: GraphOperation) -> Range:
    one, other = plain(operation.range(0)), plain(operation.range(1))
    if operation.inputs[0].debugName() == operation.inputs[1].debugName():
        return square(one)
    if one.boolean and other.boolean:
        return BOOLEAN
    result, limit = multiply(one, other), root_mean_square_limit(operation)
    return replace(result, low=max(result.low, -limit), high=min(result.high, limit))


@_rule("div", "true_divide", "divide")
def _divide(operation: GraphOperation) -> Range:
    if len(operation.inputs) > 2:
        return _floor_divide(operation)
    return divide(plain(operation.range(0)), plain(operation.range(1)))


@_rule("floor_divide", "__floordiv__")
def _floor_divide(operation: GraphOperation) -> Range:
    """A quotient that overflows makes NaN on its way to a whole number."""
    one, other = plain(operation.range(0)), plain(operation.range(1))
    quotient = divide(one, other)
    below = 1 if one.low < 0 or other.low < 0 else 0  # The quotient may have been rounded up to zero.
    return ANYTHING if quotient.may_be_infinite else _whole_numbers(replace(quotient, low=quotient.low - below))


def _whole_numbers(value: Range) -> Range:
    """The range of the numbers rounded up or down."""
    low = math.floor(value.low) if value.low > -inf else -inf
    return Range(low=low, high=math.ceil(value.high) if value.high < inf else inf, nan=value.nan)


@_rule("fmod", "remainder")
def _remainder(operation: GraphOperation) -> Range:
    value, divisor = plain(operation.range(0)), plain(operation.range(1))
    lost = value.nan or divisor.nan or value.may_be_infinite or divide(value, divisor).may_be_infinite
    return symmetric(max(value.largest, divisor.largest), nan=lost)


@_rule("neg", "negative")
def _negative(operation: GraphOperation) -> Range:
    return negative(operation.range(0))


@_rule("abs", "absolute")
def _absolute(operation: GraphOperation) -> Range:
    return absolute(plain(operation.range(0)))


@_rule("square")
def _square(operation: GraphOperation) -> Range:
    return square(plain(operation.range(0)))


@_rule("reciprocal")
def _reciprocal(operation: GraphOperation) -> Range:
    return reciprocal(plain(operation.range(0)))


@_rule("sqrt")
def _root(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    return increasing(lambda x: math.sqrt(max(x, 0.0)), value, nan=value.low < 0)


@_rule("rsqrt")
def _reciprocal_root(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if value.low <= 0:
        return ANYTHING
    return Range(low=value.high**-0.5 if value.high < inf else 0.0, high=value.low**-0.5, nan=value.nan)


LOGARITHMS = {"log": math.log, "log2": math.log2, "log10": math.log10}


@_rule(*LOGARITHMS)
def _logarithm(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if value.low <= 0:
        return ANYTHING
    function = LOGARITHMS[operation.name]
    return increasing(lambda x: function(x) if x < inf else inf, value)


@_rule("log1p")
def _logarithm_of_sum(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if value.low <= -1:
        return ANYTHING
    return increasing(lambda x: math.log1p(x) if x < inf else inf, value)


def _exponential(x: float) -> float:
    return inf if x > EXP_OVERFLOW else math.exp(x)


@_rule("exp", "expm1", "exp2", "sinh", "cosh")
def _exp(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name == "exp":
        return increasing(_exponential, value)
    if operation.name == "expm1":
        return increasing(lambda x: inf if x > EXP_OVERFLOW else math.expm1(x), value)
    if operation.name == "exp2":
        return increasing(lambda x: inf if x >= 128 else 2.0**x, value)
    return symmetric(_exponential(value.largest), nan=value.nan)


@_rule("pow", "float_power")
def _power(operation: GraphOperation) -> Range:
    base, exponent, whole = plain(operation.range(0)), plain(operation.range(1)), operation.number(1)
    if whole is not None and 0 <= whole <= 64 and whole == int(whole):
        bounds = [_power_of(bound, int(whole)) for bound in (base.low, base.high)]
        low = 0.0 if whole % 2 == 0 and base.may_be_zero else min(bounds)
        return Range(low=min(low, *bounds) if whole % 2 else low, high=max(bounds), nan=base.nan)
    if base.low < 0 or (base.low == 0 and exponent.low < 0) or base.may_be_infinite or exponent.may_be_infinite:
        return ANYTHING
    powers = [_power_of(one, other) for one in (base.low, base.high) for other in (exponent.low, exponent.high)]
    return Range(low=min(powers), high=max(powers), nan=base.nan or exponent.nan)


def _power_of(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return -inf if base < 0 and exponent % 2 == 1 else inf
    except ZeroDivisionError:
        return inf


@_rule("sigmoid", "hardsigmoid", "normal_cdf")
def _share(operation: GraphOperation) -> Range:
    return Range(low=0.0, high=1.0, nan=operation.range(0).nan)


@_rule("tanh", "erf", "softsign", "sign", "sgn")
def _signed_share(operation: GraphOperation) -> Range:
    value = operation.range(0)
    lost = operation.name == "softsign" and plain(value).may_be_infinite
    return Range(low=0.0 if value.low >= 0 and not value.masked else -1.0, high=1.0, nan=value.nan or lost)


@_rule("atan", "arctan", "atan2")
def _angle(operation: GraphOperation) -> Range:
    return symmetric(math.pi, nan=any(each.nan for each in operation.tensors()))


@_rule("sin", "cos")
def _wave(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    return symmetric(1.0, nan=value.nan or value.may_be_infinite)


@_rule("relu", "relu6", "hardtanh", "clamp", "clip", "clamp_min", "clamp_max", "threshold")
def _clamp(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name == "relu":
        return clamped(value, 0.0, inf)
    if operation.name == "relu6":
        return clamped(value, 0.0, 6.0)
    if operation.name == "threshold":
        return hull([value, operation.range(2)])
    lower, upper = (1, 2) if operation.name not in ("clamp_min", "clamp_max") else (1, 1)
    low = Range(low=-inf, high=-inf) if operation.name == "clamp_max" else _limit(operation, lower, -inf)
    high = Range(low=inf, high=inf) if operation.name == "clamp_min" else _limit(operation, upper, inf)
    bounds = clamped(value, low.low, high.high)
    ends = [max(bounds.low, min(low.low, high.low)), min(bounds.high, max(high.high, low.high))]
    return Range(
        low=min(ends[0], high.low),
        high=max(ends[1], low.high if low.high > bounds.high else ends[1]),
        nan=value.nan or low.nan or high.nan,
    )


def _limit(operation: GraphOperation, index: int, missing: float) -> Range:
    if operation.name == "hardtanh" and operation.is_none(index):
        return Range(low=math.copysign(1.0, missing), high=math.copysign(1.0, missing))
    return Range(low=missing, high=missing) if operation.is_none(index) else operation.range(index)


def _bound(operation: GraphOperation, index: int, default: float) -> float:
    found = operation.number(index)
    return default if found is None else found


@_rule("leaky_relu", "prelu", "rrelu")
def _leaky(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    slope = hull([operation.range(1), operation.range(2)]) if operation.name == "rrelu" else operation.range(1)
    if operation.name == "leaky_relu" and operation.is_none(1):
        slope = symmetric(1.0)
    return hull([clamped(value, 0.0, inf), multiply(clamped(value, -inf, 0.0), plain(slope))])


SELU = (1.6733, 1.0508)
"""Alpha and scale, rounded up. Source: Klambauer et al., 2017."""


@_rule("elu", "selu", "celu")
def _exponential_unit(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    alpha, scale = (_bound(operation, index, 1.0) for index in (1, 2))
    if operation.name == "selu":
        alpha, scale = SELU
    if operation.name == "celu":
        scale = 1.0
    if alpha <= 0 or scale <= 0:
        return ANYTHING
    return rounded(Range(low=-alpha * scale, high=max(value.high, 0.0) * scale, nan=value.nan))


@_rule("gelu", "silu", "mish", "hardswish")
def _smooth(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    low = max(value.low, -NEGATIVE_PART) if value.low < 0 else 0.0
    # hardswish multiplies by up to 6 and gelu, in vectors of AVX-512, by up to 2 before they divide.
    overflows = {"hardswish": 6.0, "gelu": 2.0}.get(operation.name, 0.0) * value.largest >= OVERFLOW
    lost = value.nan or value.low == -inf or overflows
    return Range(low=low, high=inf if overflows else max(value.high, 0.0), nan=lost)


@_rule("softplus", "log_sigmoid")
def _smooth_sum(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name == "log_sigmoid":
        return Range(low=min(value.low, 0.0) - 1, high=0.0, nan=value.nan)
    beta, threshold = _bound(operation, 1, 1.0), _bound(operation, 2, 20.0)
    if beta <= 0 or not 0 <= threshold < EXP_OVERFLOW:  # Numbers beyond the threshold are left as they are.
        return ANYTHING
    return Range(low=0.0, high=max(value.high, 0.0) + 1 / beta, nan=value.nan)


@_rule("floor", "ceil", "round", "trunc", "fix", "frac")
def _whole(operation: GraphOperation) -> Range:
    value = plain(operation.range(0))
    if operation.name == "frac":
        return symmetric(1.0, nan=value.nan or value.may_be_infinite)
    decimals = operation.number(1) if operation.name == "round" and len(operation.inputs) > 1 else 0.0
    return _whole_numbers(value) if decimals == 0 else _rounded_to(value, decimals)


def _rounded_to(value: Range, decimals: float | None) -> Range:
    """The range of numbers that are multiplied by a power of ten, rounded and divided again: they may overflow."""
    scale = 10.0**decimals if decimals is not None and abs(decimals) < 38 else inf
    if scale == inf or value.largest * max(scale, 1 / scale) >= OVERFLOW:
        return symmetric(inf, nan=True)
    return Range(low=value.low - 1 / scale, high=value.high + 1 / scale, nan=value.nan)


@_rule("maximum")
def _maximum(operation: GraphOperation) -> Range:
    return larger(operation.range(0), operation.range(1))


@_rule("minimum")
def _minimum(operation: GraphOperation) -> Range:
    return smaller(operation.range(0), operation.range(1))


def larger(one: Range, other: Range) -> Range:
    """The range of the larger one of two numbers."""
    one, other = plain(one), plain(other)
    return Range(low=max(one.low, other.low), high=max(one.high, other.high), nan=one.nan or other.nan)


def smaller(one: Range, other: Range) -> Range:
    """The range of the smaller one of two numbers."""
    return negative(larger(negative(plain(one)), negative(plain(other))))


@_rule("lerp")
def _between(operation: GraphOperation) -> Range:
    start, end, weight = (plain(operation.range(index)) for index in range(3))
    return _unless_infinite(add(end, negative(start)), lambda distance: add(start, multiply(weight, distance)))


@_rule("addcmul", "addcdiv")
def _add_product(operation: GraphOperation) -> Range:
    combined = multiply if operation.name == "addcmul" else divide
    one, other = plain(operation.range(1)), plain(operation.range(2))
    factor = operation.range(3) if len(operation.inputs) > 3 else Range(low=1.0, high=1.0)
    return _unless_infinite(
        multiply(one, factor),
        lambda scaled: _unless_infinite(combined(scaled, other), lambda term: add(operation.range(0), term)),
    )


def _unless_infinite(part: Range, whole: Callable[[Range], Range]) -> Range:
    """The range of what is made of a part, in which nothing may overflow."""
    return ANYTHING if part.may_be_infinite else whole(part)


@_rule(
    *("gt", "ge", "lt", "le", "eq", "ne", "__gt__", "__lt__", "isnan", "isinf", "isfinite", "any", "all", "isin"),
    *("logical_not", "logical_and", "logical_or", "logical_xor", "is_floating_point", "equal", "isclose"),
)
def _truth(operation: GraphOperation) -> Range:
    return BOOLEAN


@_rule("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__iand__", "__ior__")
def _bits(operation: GraphOperation) -> Range:
    return BOOLEAN if all(each.boolean for each in operation.tensors()) else WHOLE


@_rule("argmax", "argmin", "argsort", "bucketize", "searchsorted", "nonzero", "multinomial")
def _position(operation: GraphOperation) -> Range:
    return WHOLE
