"""Operations that must not be fused because another one may make NaN of finite inputs, and they would make it a number.

oneDNN computes maxima and exponentials in an order in which NaN is lost: a fused relu gives 0 for it. Whether an
operation may make NaN is found out from the graph: the root of a square cannot, the logarithm of an input can.
"""

from __future__ import annotations

from math import isinf, isnan
from typing import Any

import torch
from torch import Tensor

LOSING = frozenset({"relu", "relu6", "hardtanh", "clamp", "exp", "max_pool2d", "max_pool2d_with_indices"})
"""Found with torch 2.13, by trying all fusible operations behind linear and conv2d, with each instruction set."""

DIVISORS = {
    **dict.fromkeys(("reciprocal", "rsqrt", "log", "log2", "log10"), 0),
    **dict.fromkeys(("div", "true_divide", "floor_divide", "fmod", "remainder"), 1),
    "addcdiv": 2,
}
"""These make NaN, or infinity, of which later operations make NaN, unless the argument at this place is positive."""

ROOTS = frozenset({"sqrt", "log1p", "xlogy"})
"""These do so of negative numbers."""

OTHERS = frozenset(
    (
        *("acos", "acosh", "arccos", "arccosh", "asin", "arcsin", "atanh", "arctanh", "logit", "erfinv", "lgamma"),
        *("digamma", "polygamma", "igamma", "igammac", "mvlgamma", "logdet", "slogdet", "inverse", "cholesky_inverse"),
    )
)
FAMILIES = ("linalg_", "_linalg_", "special_")
"""Beginnings of names: matrices may be singular, and most of these functions have poles."""

SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})
MIXING = SOFTMAX | {"linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "_convolution"}
"""These make NaN of a row in which all is -infinity."""

MASKING = {"masked_fill": 1, "where": 0, "index_fill": 2, "index_put": 1, "scatter": 2}
"""The place of what says where an operation puts a number."""

FILLING = frozenset({"full_like", "new_full", "fill"})
"""What makes a tensor of one number."""

BOOLEAN = frozenset(
    (
        *("gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "isfinite", "any", "all"),
        *("logical_not", "logical_and", "logical_or", "logical_xor"),
    )
)
CLEARING = BOOLEAN | {"nan_to_num", "shape", "size", "argmax", "argmin"}
WHOLE_TYPES = (0, 1, 2, 3, 4, 11)
"""The integer types and bool, as TorchScript numbers them. Source: c10/core/ScalarType.h."""

MOVING = frozenset(
    (
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "to", "type_as", "contiguous", "transpose"),
        *("permute", "select", "slice", "flatten", "alias", "detach", "clone", "mean", "sum", "amax", "sqrt", "rsqrt"),
        *("float", "t", "numpy_T", "repeat", "broadcast_to", "unflatten", "narrow", "gather", "cumsum"),
    )
)
"""The result of such an operation has the sign of its first tensor."""

NEVER_NEGATIVE = frozenset(
    (
        *("square", "abs", "relu", "relu6", "exp", "sigmoid", "softmax", "_softmax", "norm", "linalg_vector_norm"),
        *("var", "std", "linalg_norm", "frobenius_norm", "softplus", "exp2", "ones_like", "zeros_like"),
    )
)
DEPTH = 10
"""How many operations back the sign of a value is looked for."""

SMALLEST = 1e-37
"""Smaller numbers are zero in fp32."""

SMALL = 16
"""Larger tensors are not looked at: in the helper process, their elements are random."""


Signs = dict[tuple[str, bool], bool]
"""What is known of values, by name: whether they are never negative (False) or always positive (True)."""


def losing(graph: Any, fusible: list[Any]) -> frozenset[int]:
    """The positions, in `fusible`, of operations that would make a number of NaN that comes of finite inputs."""
    doubtful = _doubtful(graph)
    return frozenset(
        position
        for position, node in enumerate(fusible)
        if _name(node) in LOSING and any(value.debugName() in doubtful for value in node.inputs())
    )


def _doubtful(graph: Any) -> set[str]:
    """The names of values that may hold NaN though all inputs are finite."""
    doubtful: set[str] = set()
    nodes, masked = list(graph.nodes()), _masked(graph)
    signs = {(name, positive): False for name in _written(graph, nodes) for positive in (False, True)}
    for node in nodes:
        inputs = list(node.inputs())
        known = not _is_cleared(node) and (
            any(value.debugName() in doubtful for value in inputs) or (bool(doubtful) and any(node.blocks()))
        )
        if known or _may_make_nan(node, signs) or (_name(node) in MIXING and inputs[0].debugName() in masked):
            if _writes(node) and inputs[0].debugName() not in doubtful:
                doubtful.update(_aliases(graph, nodes, inputs[0]))
            doubtful.update(value.debugName() for value in node.outputs())
    return doubtful


def _name(node: Any) -> str:
    return str(node.kind()).partition("::")[2].removesuffix("_")


def _is_cleared(node: Any) -> bool:
    """Whether no NaN in its inputs makes NaN of the result."""
    return _name(node) in CLEARING or _is_converted(node, WHOLE_TYPES)


def _is_converted(node: Any, types: tuple[int, ...]) -> bool:
    """Whether this converts a tensor to one of these types."""
    inputs = list(node.inputs())
    return _name(node) == "to" and len(inputs) > 1 and _is_number(inputs[1]) and _number(inputs[1]) in types


def _writes(node: Any) -> bool:
    """Whether the operation changes its first tensor in place."""
    return node.kind().endswith("_") and not node.kind().endswith("__")


def _written(graph: Any, nodes: list[Any]) -> frozenset[str]:
    """The names of values whose memory is changed in place, perhaps by way of another value."""
    if not any(map(_writes, nodes)):
        return frozenset()
    memory = graph.alias_db()
    return frozenset(value.debugName() for node in nodes for value in node.outputs() if memory.has_writers(value))


def _aliases(graph: Any, nodes: list[Any], value: Any) -> set[str]:
    """The names of values that may share memory with this one."""
    memory = graph.alias_db()
    values = (each for node in nodes for each in node.outputs() if each.type().kind() == "TensorType")
    return {each.debugName() for each in values if memory.may_contain_alias(each, value)}


def _masked(graph: Any) -> set[str]:
    """The names of values that hold -infinity at places that depend on an input.

    Where they depend on none, softmax makes the same NaN of them in all calls, and the graph is not used.
    """
    given: set[str] = {value.debugName() for value in graph.inputs()}
    masked: set[str] = set()
    nodes = list(graph.nodes())
    for node in nodes:
        inputs = list(node.inputs())
        names = [value.debugName() for value in inputs]
        if given.isdisjoint(names) and not any(node.blocks()):
            continue
        own = {value.debugName() for value in node.outputs()}
        given |= own
        place = MASKING.get(_name(node))
        is_chosen = _name(node) in FILLING or (place is not None and names[place] in given)
        fills = is_chosen and any(map(_is_infinite, inputs))
        if fills or not (_is_cleared(node) or _name(node) in SOFTMAX or masked.isdisjoint(names)):
            masked |= own
            if _writes(node):
                masked |= _aliases(graph, nodes, inputs[0])
    return masked


def _is_infinite(value: Any) -> bool:
    number = _number(value)
    return number is not None and isinf(number)


def _may_make_nan(node: Any, signs: Signs) -> bool:
    name, inputs = _name(node), list(node.inputs())
    if name in OTHERS or (name.startswith(FAMILIES) and name not in NEVER_NEGATIVE):
        return True
    if any(isnan(_number(value) or 0.0) for value in inputs):
        return True
    if name == "mul" and any(map(_is_infinite, inputs)):  # Of zero.
        return True
    if name in ROOTS:
        return not _is_at_least(inputs[0], signs, positive=False)
    if name in DIVISORS:
        divisor = inputs[DIVISORS[name]]
        return not (_is_nonzero(divisor) or _is_at_least(divisor, signs, positive=True))
    return name in ("pow", "float_power") and not _is_safe_power(inputs[0], inputs[1], signs)


def _is_safe_power(base: Any, exponents: Any, signs: Signs) -> bool:
    exponent = _number(exponents)
    if _is_number(base) and _is_at_least(base, signs, positive=True):
        return True
    if exponent is None:
        return False
    if exponent >= 0:
        whole = _is_number(exponents) and exponent == int(exponent)
        return whole or _is_at_least(base, signs, positive=False)
    return _is_at_least(base, signs, positive=True)


def _is_at_least(value: Any, signs: Signs, *, positive: bool, depth: int = DEPTH) -> bool:
    """Whether the graph shows that no finite input makes the value negative; with `positive`, nor zero.

    Effect: adds what is found to `signs`.
    """
    key = (value.debugName(), positive)
    if key not in signs:
        if depth == 0:
            return False
        signs[key] = _is_shown(value, signs, positive=positive, depth=depth)
    return signs[key]


def _is_shown(value: Any, signs: Signs, *, positive: bool, depth: int) -> bool:
    number = _number(value)
    if number is not None:
        return number >= SMALLEST or (number >= 0 and not positive)
    node = value.node()
    name, inputs = _name(node), list(node.inputs())
    if name in ("clamp", "clamp_min", "maximum", "add") and len(inputs) > 1:
        return _is_bounded(name, inputs, signs, positive=positive, depth=depth - 1)
    if name in MOVING and inputs:
        return _is_at_least(inputs[0], signs, positive=positive, depth=depth - 1)
    if positive:
        return False
    if name in ("mul", "div"):
        same = name == "mul" and inputs[0].debugName() == inputs[1].debugName()
        return same or all(_is_at_least(each, signs, positive=False, depth=depth - 1) for each in inputs[:2])
    if name == "pow":
        exponent = _number(inputs[1]) if _is_number(inputs[1]) else None
        return exponent is not None and exponent % 2 == 0
    if name in ("var_mean", "std_mean"):
        return bool(value.debugName() == node.outputsAt(0).debugName())
    return name in NEVER_NEGATIVE or _is_boolean(node)


def _is_boolean(node: Any) -> bool:
    """Whether the result is of type bool."""
    if _name(node) == "bitwise_not":
        node = node.inputsAt(0).node()
    return _name(node) in BOOLEAN or _is_converted(node, (11,))


def _is_bounded(name: str, inputs: list[Any], signs: Signs, *, positive: bool, depth: int) -> bool:
    if name == "add":  # One positive term is enough if neither is negative; the third input multiplies the second.
        if len(inputs) > 2 and (_number(inputs[2]) or 0.0) <= 0:
            return False
        return all(_is_at_least(each, signs, positive=False, depth=depth) for each in inputs[:2]) and (
            not positive or any(_is_at_least(each, signs, positive=True, depth=depth) for each in inputs[:2])
        )
    bounds = inputs[:2] if name == "maximum" else inputs[1:2]
    return any(_is_at_least(each, signs, positive=positive, depth=depth) for each in bounds)


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


def _is_number(value: Any) -> bool:
    """Whether this is a constant that is one number."""
    return _number(value) is not None and value.type().kind() != "TensorType"


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
