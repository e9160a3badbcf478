"""One operation of a TorchScript graph: its inputs as constants and as ranges."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from cpulaunch.worker.fusion.ranges.interval import ANYTHING, BOOLEAN, Range, number

UNKNOWN_COUNT = 2.0**40
"""More elements than a tensor has. Shapes are not known here."""

SKIPPED = ("float", "detach", "contiguous", "alias", "expand", "expand_as", "broadcast_to")
"""Operations whose result has the same elements."""

WIDE = (6, 7)
"""fp32 and fp64, as TorchScript numbers them: conversions to others change elements. Source: c10/core/ScalarType.h."""


class Constants:
    """Ranges of the constant tensors of one graph, each computed once, by the name of its value.

    `has_single_variance`: a variance of one element, which is NaN, is computed somewhere.
    """

    def __init__(self, *, has_single_variance: bool = False) -> None:
        self.has_single_variance = has_single_variance
        self._ranges: dict[str, Range] = {}
        self._gains: dict[tuple[str, tuple[int, ...]], float] = {}

    def range_of(self, name: str, value: Any) -> Range | None:
        """The range of a constant; None if it holds no numbers."""
        if name not in self._ranges:
            found = _constant_range(value)
            if found is None:
                return None
            self._ranges[name] = found
        return self._ranges[name]

    def gain(self, name: str, value: Tensor, dimensions: tuple[int, ...]) -> float:
        """The largest sum of magnitudes over these dimensions."""
        key = (name, dimensions)
        if key not in self._gains:
            sums = torch.linalg.vector_norm(value.detach().float(), 1, dim=dimensions)
            self._gains[key] = float(sums.max()) if sums.numel() else 0.0
        return self._gains[key]


def _constant_range(value: Any) -> Range | None:
    if isinstance(value, bool):
        return Range(low=float(value), high=float(value), boolean=True)
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple) and value and all(type(item) in (int, float) for item in value):
        return Range(low=float(min(value)), high=float(max(value)))
    if not isinstance(value, Tensor) or value.is_complex() or value.is_quantized or value.layout is not torch.strided:
        return ANYTHING if isinstance(value, Tensor) else None
    if not value.numel():
        return number(0.0)
    if value.dtype is torch.bool:
        return BOOLEAN
    low, high = (float(bound) for bound in torch.aminmax(value.detach()))
    if isfinite(low) and isfinite(high):
        return Range(low=low, high=high)
    if low != low:
        return ANYTHING
    finite = value.detach()[value.detach().isfinite()]
    if not finite.numel():
        return Range(low=low, high=high)
    return Range(low=float(finite.min()), high=float(finite.max()), masked=True)


class GraphOperation:
    """One operation with what is known of its inputs.

    `fixed`: names of values that are the same in all calls.
    """

    def __init__(self, node: Any, known: Mapping[str, Range], fixed: set[str], constants: Constants) -> None:
        self.name = kind_of(node)
        self.inputs = list(node.inputs())
        self._known = known
        self._fixed = fixed
        self._constants = constants

    @property
    def has_single_variance(self) -> bool:
        """Whether the variance of one element, which is NaN, may be computed."""
        return self._constants.has_single_variance

    def range(self, index: int) -> Range:
        """The range of an input."""
        if index >= len(self.inputs):
            return ANYTHING
        return self._known.get(self.inputs[index].debugName(), ANYTHING)

    def tensors(self) -> list[Range]:
        """The ranges of the inputs that are tensors or lists of tensors."""
        return [
            self._known.get(value.debugName(), ANYTHING) for value in self.inputs if str(value.type()).count("Tensor")
        ]

    def is_fixed(self, index: int) -> bool:
        """Whether an input is the same in all calls."""
        return index < len(self.inputs) and self.inputs[index].debugName() in self._fixed

    def number(self, index: int) -> float | None:
        """An input that is one constant number."""
        value = self.constant(index)
        return float(value) if isinstance(value, bool | int | float) else None

    def constant(self, index: int) -> Any:
        """The value of an input that is a constant; None for others."""
        return constant_of(self.inputs[index]) if index < len(self.inputs) else None

    def is_none(self, index: int) -> bool:
        """Whether the input is missing or None."""
        return index >= len(self.inputs) or bool(self.inputs[index].node().mustBeNone())

    def gain(self, index: int, *dimensions: int) -> float:
        """By how much a product with the input, a tensor, exceeds the other factor: sums over these dimensions."""
        value = self.constant(index)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= len(dimensions):
            return self._constants.gain(self.inputs[index].debugName(), value, dimensions)
        largest = self.range(index).largest
        return largest * UNKNOWN_COUNT if largest else 0.0

    def count(self, index: int) -> float:
        """The product of a constant list of sizes; UNKNOWN_COUNT if it is none."""
        sizes = self.constant(index)
        is_known = isinstance(sizes, list | tuple) and bool(sizes) and all(type(size) is int for size in sizes)
        return float(prod(sizes)) if is_known else UNKNOWN_COUNT


def kind_of(node: Any) -> str:
    """The name of an operation without its namespace, and without the mark of an operation in place."""
    return str(node.kind()).partition("::")[2].removesuffix("_")


def constant_of(value: Any) -> Any:
    """The value of a constant; None if it is none."""
    node = value.node()
    return value.toIValue() if node.kind() == "prim::Constant" and not node.mustBeNone() else None


def origin(value: Any) -> Any:
    """The value of which this one has the elements."""
    while value.node().inputsSize() and _keeps_elements(value.node()):
        value = value.node().inputsAt(0)
    return value


def _keeps_elements(node: Any) -> bool:
    if kind_of(node) not in ("to", "_to_copy"):
        return kind_of(node) in SKIPPED
    given = [constant_of(each) for each in list(node.inputs())[1:3]]
    return next((kind for kind in given if type(kind) is int), None) in WIDE


def is_subtracted_maximum(operation: GraphOperation) -> bool:
    """Whether the second input is the largest element of the first one: the difference is not positive."""
    if len(operation.inputs) < 2 or operation.number(2) not in (None, 1.0):
        return False
    largest = origin(operation.inputs[1])
    node = largest.node()
    if kind_of(node) not in ("amax", "max", "logsumexp") or not node.inputsSize():
        return False
    if node.outputsSize() > 1 and largest.debugName() != node.outputsAt(0).debugName():
        return False
    if not _is_aligned(node):
        return False
    return bool(origin(node.inputsAt(0)).debugName() == origin(operation.inputs[0]).debugName())


def _is_aligned(reduction: Any) -> bool:
    """Whether a result, broadcast, is next to the elements that it was computed of.

    It is if the reduction keeps the dimension, or is over the first one, over all, or over two tensors. Without, that
    of a square matrix's rows would be next to its columns.
    """
    if reduction.inputsSize() < 3:
        return True
    dimensions = constant_of(reduction.inputsAt(1))
    return dimensions in (0, [0], []) or constant_of(reduction.inputsAt(2)) is True


def root_mean_square_limit(operation: GraphOperation) -> float:
    """The largest result of a product of a value with 1 / sqrt(mean(value²) + epsilon): infinite if it is none."""
    for one, other in ((0, 1), (1, 0)):
        node = origin(operation.inputs[other]).node() if len(operation.inputs) > other else None
        if node is None or kind_of(node) != "rsqrt":
            continue
        mean = _without_added(node.inputsAt(0)).node()
        if kind_of(mean) != "mean" or not _is_aligned(mean):
            continue
        squared = mean.inputsAt(0).node()
        if kind_of(squared) not in ("pow", "square", "mul"):
            continue
        factors = list(squared.inputs())[: 2 if kind_of(squared) == "mul" else 1]
        is_square = kind_of(squared) != "pow" or constant_of(squared.inputsAt(1)) == 2
        name = origin(operation.inputs[one]).debugName()
        if is_square and all(origin(factor).debugName() == name for factor in factors):
            return UNKNOWN_COUNT**0.5
    return inf


def _without_added(value: Any) -> Any:
    """The first term of a sum with a constant that is not negative."""
    node = value.node()
    if kind_of(node) != "add" or constant_of(node.inputsAt(2)) != 1:
        return value
    added = _constant_range(constant_of(node.inputsAt(1)))
    return node.inputsAt(0) if added is not None and added.low >= 0 else value
