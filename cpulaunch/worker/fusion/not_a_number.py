"""Operations that must not be fused because another one may make NaN of finite inputs, and they would make it a number.

oneDNN computes maxima and exponentials in an order in which NaN is lost: a fused relu gives 0 for it. Whether an
operation may make NaN is found out from the graph: the root of a square cannot, the logarithm of an input can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOSING = frozenset({"relu", "relu6", "hardtanh", "clamp", "exp", "max_pool2d", "max_pool2d_with_indices"})
"""Found with torch 2.13, by trying all fusible operations behind linear and conv2d, with each instruction set."""

DIVISIONS = frozenset({"div", "true_divide", "fmod", "remainder", "reciprocal", "rsqrt", "log", "log2", "log10"})
"""These make NaN, or infinity, of which later operations make NaN, unless the last of their tensors is positive."""

ROOTS = frozenset({"sqrt", "log1p", "xlogy"})
"""These do so of negative numbers."""

OTHERS = frozenset({"acos", "acosh", "arccos", "arccosh", "asin", "arcsin", "atanh", "arctanh", "logit", "erfinv"})
CLEARING = frozenset({"nan_to_num", "isnan", "isfinite", "shape", "size"})

MOVING = frozenset(
    (
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "to", "type_as", "contiguous", "transpose"),
        *("permute", "select", "slice", "flatten", "alias", "detach", "clone", "mean", "sum", "amax", "sqrt", "rsqrt"),
        *("float", "t", "numpy_T", "repeat", "broadcast_to", "unflatten", "narrow", "gather"),
    )
)
"""The result of such an operation has the sign of its first tensor."""

NEVER_NEGATIVE = frozenset(
    (
        *("square", "abs", "relu", "relu6", "exp", "sigmoid", "softmax", "_softmax", "norm", "linalg_vector_norm"),
        *("var", "std", "linalg_norm", "frobenius_norm", "softplus", "exp2"),
    )
)
DEPTH = 10
"""How many operations back the sign of a value is looked for."""

SMALL = 16
"""Larger tensors are not looked at: in the helper process, their elements are random."""


def losing(graph: Any, fusible: list[Any]) -> frozenset[int]:
    """The positions, in `fusible`, of operations that would make a number of NaN that comes of finite inputs."""
    doubtful: set[str] = set()
    for node in graph.nodes():
        name = _name(node)
        known = name not in CLEARING and (
            any(value.debugName() in doubtful for value in node.inputs()) or (bool(doubtful) and any(node.blocks()))
        )
        if known or _may_make_nan(node):
            doubtful.update(value.debugName() for value in node.outputs())
    return frozenset(
        position
        for position, node in enumerate(fusible)
        if _name(node) in LOSING and any(value.debugName() in doubtful for value in node.inputs())
    )


def _name(node: Any) -> str:
    return str(node.kind()).partition("::")[2].removesuffix("_")


def _may_make_nan(node: Any) -> bool:
    name, inputs = _name(node), list(node.inputs())
    if name in OTHERS:
        return True
    if name in ROOTS:
        return not _is_at_least(inputs[0], positive=False)
    if name in DIVISIONS:
        divisor = inputs[1] if name in ("div", "true_divide", "fmod", "remainder") else inputs[0]
        return not (_is_nonzero(divisor) or _is_at_least(divisor, positive=True))
    return name == "pow" and not _is_safe_power(inputs[0], _number(inputs[1]))


def _is_safe_power(base: Any, exponent: float | None) -> bool:
    if exponent is None:
        return False
    if exponent >= 0:
        return exponent == int(exponent) or _is_at_least(base, positive=False)
    return _is_at_least(base, positive=True)


def _is_at_least(value: Any, *, positive: bool, depth: int = DEPTH) -> bool:
    """Whether the graph shows that no finite input makes the value negative; with `positive`, nor zero."""
    if depth == 0:
        return False
    number = _number(value)
    if number is not None:
        return number > 0 or (number == 0 and not positive)
    node = value.node()
    name, inputs = _name(node), list(node.inputs())
    if name in ("clamp", "clamp_min", "maximum", "add") and len(inputs) > 1:
        return _is_bounded(name, inputs, positive=positive, depth=depth - 1)
    if name in MOVING and inputs:
        return _is_at_least(inputs[0], positive=positive, depth=depth - 1)
    if positive:
        return False
    if name in ("mul", "div"):
        same = name == "mul" and inputs[0].debugName() == inputs[1].debugName()
        return same or all(_is_at_least(each, positive=False, depth=depth - 1) for each in inputs[:2])
    if name == "pow":
        exponent = _number(inputs[1])
        return exponent is not None and exponent % 2 == 0
    return name in NEVER_NEGATIVE


def _is_bounded(name: str, inputs: list[Any], *, positive: bool, depth: int) -> bool:
    if name == "add":  # One positive term is enough if neither is negative; the third input multiplies the second.
        if len(inputs) > 2 and (_number(inputs[2]) or 0.0) <= 0:
            return False
        return all(_is_at_least(each, positive=False, depth=depth) for each in inputs[:2]) and (
            not positive or any(_is_at_least(each, positive=True, depth=depth) for each in inputs[:2])
        )
    bounds = inputs[:2] if name == "maximum" else inputs[1:2]
    return any(_is_at_least(each, positive=positive, depth=depth) for each in bounds)


def _number(value: Any) -> float | None:
    """The smallest number of a constant; None if it is none, or has too many elements."""
    if value.node().kind() != "prim::Constant" or value.node().mustBeNone():
        return None
    constant = value.toIValue()
    if isinstance(constant, int | float):
        return float(constant)
    if isinstance(constant, Tensor) and 0 < constant.numel() <= SMALL and constant.dtype.is_floating_point:
        return float(constant.min())
    return None


def _is_nonzero(value: Any) -> bool:
    """Whether this is a constant without zeros, or a size."""
    if str(value.type().kind()) == "IntType" or value.node().kind() == "prim::NumToTensor":
        return True
    if value.node().kind() != "prim::Constant":
        return False
    constant = value.toIValue()
    if isinstance(constant, Tensor):
        return constant.numel() <= SMALL and bool(torch.all(constant != 0))
    return bool(constant)
