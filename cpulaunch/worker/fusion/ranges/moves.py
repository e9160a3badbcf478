"""Ranges of the results of operations that move, choose or make elements."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, inf, isinf

from torch import Tensor

from cpulaunch.records.record import replace
from cpulaunch.worker.fusion.ranges.elementwise import Rule, larger, smaller
from cpulaunch.worker.fusion.ranges.interval import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    WHOLE,
    Range,
    clamped,
    hull,
    plain,
    symmetric,
)
from cpulaunch.worker.fusion.ranges.operation import GraphOperation

KEPT = (
    *("view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "transpose", "permute", "select"),
    *("slice", "flatten", "alias", "detach", "clone", "t", "numpy_T", "repeat", "repeat_interleave", "broadcast_to"),
    *("unflatten", "narrow", "gather", "index", "index_select", "roll", "flip", "movedim", "swapaxes", "swapdims"),
    *("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unfold", "as_strided", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "amax", "amin", "max_pool1d", "max_pool2d", "max_pool3d", "topk", "sort"),
    *("max_pool2d_with_indices", "adaptive_max_pool2d", "cummax", "diagonal", "embedding", "ravel", "view_as"),
    *(
        "reshape_as",
        "take_along_dim",
        "take",
        "masked_select",
        "lift_fresh",
        "upsample_nearest1d",
        "median",
    ),
    *("upsample_nearest2d", "resolve_conj", "resolve_neg", "moveaxis", "hsplit", "vsplit", "rot90", "_reshape_alias"),
    *("unsafe_split", "unsafe_chunk", "data", "ScalarImplicit", "FloatImplicit", "IntImplicit", "Int", "Float", "item"),
)
"""The result has elements of the first tensor."""

WITH_ZEROS = ("tril", "triu", "diag_embed", "block_diag", "im2col", "dropout", "feature_dropout", "alpha_dropout")
"""Those, or zeros; dropout in eval mode."""

MOVES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        MOVES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule(*KEPT)
def _kept(operation: GraphOperation) -> Range:
    """An index that depends on the inputs moves the infinities of a mask."""
    value = operation.range(0)
    stays = not value.masked or all(operation.is_fixed(index) for index in range(1, len(operation.inputs)))
    return value if stays else plain(value)


@_rule(*WITH_ZEROS)
def _with_zeros(operation: GraphOperation) -> Range:
    return hull([operation.range(0), symmetric(0.0)])


@_rule("max", "min")
def _extreme(operation: GraphOperation) -> Range:
    """Of one tensor, or element by element of two."""
    if len(operation.inputs) == 2 and not operation.is_none(1) and str(operation.inputs[1].type()) == "Tensor":
        return (larger if operation.name == "max" else smaller)(operation.range(0), operation.range(1))
    return operation.range(0)


@_rule("fmax", "fmin")
def _number_of_two(operation: GraphOperation) -> Range:
    """The other number where one is NaN."""
    one, other = plain(operation.range(0)), plain(operation.range(1))
    choose = larger if operation.name == "fmax" else smaller
    found = [choose(one, other), *([other] if one.nan else []), *([one] if other.nan else [])]
    return replace(hull(found), nan=one.nan and other.nan)


LARGEST = 3.41e38
"""No number of fp32 is larger; where torch replaces infinity by its type's largest number, this may be infinite."""


@_rule("nan_to_num")
def _without_nan(operation: GraphOperation) -> Range:
    """The finite numbers, and those that replace NaN and infinities."""
    value = plain(operation.range(0))
    found = [clamped(replace(value, nan=False), -LARGEST, LARGEST)]
    for index, default, is_replaced in (
        (1, 0.0, value.nan),
        (2, LARGEST, value.high == inf),
        (3, -LARGEST, value.low == -inf),
    ):
        if not is_replaced:
            continue
        number = default if operation.is_none(index) else operation.number(index)
        if number is None:
            return ANYTHING
        found.append(Range(low=number, high=number))
    return hull(found)


WHOLE_TYPES = {
    0: (0, 255),
    1: (-128, 127),
    2: (-(2**15), 2**15 - 1),
    3: (-(2**31), 2**31 - 1),
    4: (-(2**63), 2**63 - 1),
}
FLOAT_TYPES = (5, 6, 7, 15)
BFLOAT16, BOOL_TYPE = 15, 11
"""The integer types with their bounds, those of floating point, and bool, as TorchScript numbers them.

Source: c10/core/ScalarType.h.
"""
LONG_TYPE = 4

BFLOAT16_OVERFLOW = 3.3961775292304957e38
"""From here on fp32 numbers round to infinity in bf16."""

TYPES = {"to": (1, 2), "_to_copy": (1,), "type_as": (1,)}
"""The places where conversions have their type, or a tensor of the type."""


@_rule("to", "_to_copy", "type_as", "float", "double", "half", "bool", "Bool", "long")
def _converted(operation: GraphOperation) -> Range:
    value = operation.range(0)
    if operation.name in ("bool", "Bool"):
        return BOOLEAN
    if operation.name in ("float", "double", "half"):
        return replace(value, boolean=False)
    if operation.name == "long":
        return _whole(value, LONG_TYPE)
    given = [operation.constant(place) for place in TYPES[operation.name]]
    kinds = [kind for kind in given if type(kind) is int]
    if not kinds:
        return _like_another(operation, value)
    if BOOL_TYPE in kinds:
        return BOOLEAN
    if kinds[0] in FLOAT_TYPES:
        return _in_bf16(replace(value, boolean=False)) if kinds[0] == BFLOAT16 else replace(value, boolean=False)
    return _whole(value, kinds[0])


def _in_bf16(value: Range) -> Range:
    """The range of numbers that become bf16: the largest ones of fp32, such as those that masks add, are infinite."""
    low = -inf if value.low <= -BFLOAT16_OVERFLOW else value.low
    return replace(value, low=low, high=inf if value.high >= BFLOAT16_OVERFLOW else value.high)


def _whole(value: Range, kind: int) -> Range:
    """The range of numbers that become integers of this type. What is out of its bounds may become any."""
    value, bounds = plain(value), WHOLE_TYPES.get(kind)
    if bounds is None:
        return ANYTHING
    if value.nan or value.low < bounds[0] or value.high > bounds[1]:
        return WHOLE
    return Range(low=floor(value.low), high=ceil(value.high))


def _like_another(operation: GraphOperation, value: Range) -> Range:
    """The range after a conversion to the type of another tensor, if there is one."""
    other = operation.constant(1)
    if isinstance(other, Tensor) and other.is_floating_point():
        return replace(value, boolean=False)
    if not any(str(each.type()) == "Tensor" for each in operation.inputs[1:]):
        return value
    number = BOOLEAN if value.boolean else _whole(value, LONG_TYPE)
    return replace(hull([value, number, BOOLEAN]), masked=value.masked, boolean=False)


@_rule("where")
def _where(operation: GraphOperation) -> Range:
    return _chosen(operation, 0, (1, 2)) if len(operation.inputs) == 3 else WHOLE


@_rule("masked_fill")
def _masked_fill(operation: GraphOperation) -> Range:
    return _chosen(operation, 1, (0, 2))


@_rule("index_fill", "scatter", "index_copy")
def _placed(operation: GraphOperation) -> Range:
    """With a reduction, behind the source, elements are added to or multiplied by others."""
    return _chosen(operation, 2, (0, 3)) if operation.is_none(4) else ANYTHING


@_rule("masked_scatter")
def _masked_scatter(operation: GraphOperation) -> Range:
    return _chosen(operation, 1, (0, 2))


@_rule("index_put", "_index_put_impl")
def _index_put(operation: GraphOperation) -> Range:
    return _chosen(operation, 1, (0, 2)) if not operation.number(3) else ANYTHING


def _chosen(operation: GraphOperation, place: int, sources: tuple[int, ...]) -> Range:
    """The range of elements of several sources. Infinities of a constant stay a mask if their places are constant."""
    values = [(index, operation.range(index)) for index in sources]
    if not operation.is_fixed(place):
        return hull(plain(value) for _, value in values)
    return hull(_as_mask(value) if operation.is_fixed(index) else value for index, value in values)


def _as_mask(value: Range) -> Range:
    """The range of something that is the same in all calls, without its infinities."""
    if not value.may_be_infinite or value.nan:
        return value
    return Range(
        low=0.0 if isinf(value.low) else value.low,
        high=0.0 if isinf(value.high) else value.high,
        masked=True,
    )


def fixed(value: Range) -> Range:
    """The range of a result that is the same in all calls: infinities in it are a mask."""
    return value if value.low == value.high else _as_mask(value)


@_rule("cat", "stack", "concat", "hstack", "vstack", "ListConstruct", "TupleConstruct")
def _joined(operation: GraphOperation) -> Range:
    return hull(operation.tensors()) if operation.tensors() else COUNT


@_rule("pad", "constant_pad_nd")
def _padded(operation: GraphOperation) -> Range:
    place = 3 if operation.name == "pad" else 2
    added = symmetric(0.0) if operation.is_none(place) else operation.range(place)
    return hull([operation.range(0), added])


@_rule("copy", "set_data")
def _copied(operation: GraphOperation) -> Range:
    return operation.range(1)


@_rule("fill", "full_like", "new_full", "full")
def _filled(operation: GraphOperation) -> Range:
    return operation.range(2 if operation.name == "new_full" else 1)


@_rule("zeros", "zeros_like", "new_zeros", "zero")
def _zeros(operation: GraphOperation) -> Range:
    return symmetric(0.0)


@_rule("ones", "ones_like", "new_ones")
def _ones(operation: GraphOperation) -> Range:
    return Range(low=1.0, high=1.0)


@_rule("eye", "one_hot")
def _zeros_and_ones(operation: GraphOperation) -> Range:
    return Range(low=0.0, high=1.0)


@_rule("arange")
def _counted(operation: GraphOperation) -> Range:
    return symmetric(COUNT.high)


@_rule("size", "len", "numel", "NumToTensor", "dim", "sym_size")
def _count(operation: GraphOperation) -> Range:
    return operation.range(0) if operation.name == "NumToTensor" else replace(COUNT, low=1.0)
