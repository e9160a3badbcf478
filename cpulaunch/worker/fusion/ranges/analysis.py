"""The ranges of all values of a graph, and at which of them a check at run time would bound those that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor

from cpulaunch.records.record import record, replace
from cpulaunch.worker.fusion.ranges.elementwise import ELEMENTWISE
from cpulaunch.worker.fusion.ranges.interval import (
    ANYTHING,
    HALF_OVERFLOW,
    OVERFLOW,
    WHOLE,
    Range,
    Rounding,
    rounded,
    to_bf16,
    to_fp16,
    to_fp32,
)
from cpulaunch.worker.fusion.ranges.moves import MOVES, fixed
from cpulaunch.worker.fusion.ranges.operation import Constants, GraphOperation, constant_of, kind_of
from cpulaunch.worker.fusion.ranges.sums import SUMS

RULES = ELEMENTWISE | MOVES | SUMS

CHECKABLE = {
    **dict.fromkeys(("linear", "_convolution", "convolution", "conv1d", "conv2d", "conv3d"), (0,)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), (0,)),
    **dict.fromkeys(("matmul", "mm", "bmm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}
"""Products, and the places of their factors. These exist in memory, whatever is fused."""

CHECKED = 1e9
"""Numbers within a check at run time are no larger. It is far above what models compute, and far below overflow."""

SHAPE_ONLY = frozenset(
    ("size", "full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "empty_like", "numel", "dim")
)
"""Of the first tensor, only the shape matters, which is the same in all calls."""

HALF, BFLOAT16 = 5, 15
"""fp16 and bf16, as TorchScript numbers them. Source: c10/core/ScalarType.h."""

ROUNDINGS = {HALF: to_fp16, BFLOAT16: to_bf16}

ALIKE = frozenset({"ListUnpack", "TupleUnpack", "lstm", "gru", "rnn_tanh"})
"""All results of these are in the range of the first one."""

WITH_MEANS = frozenset({"var_mean", "std_mean"})
"""The second result of these holds means."""

WITH_POSITIONS = frozenset({"max", "min", "topk", "sort", "max_pool2d_with_indices", "cummax", "median"})
"""The second result of these holds positions."""


@record
class Findings:
    """The range of each value, by name. `checks`: names of values that must be checked at run time for it to hold."""

    ranges: dict[str, Range]
    checks: tuple[str, ...]


class Analysis:
    """One graph whose values' ranges are found out, for several assumptions on its inputs."""

    def __init__(self, graph: Any, *, has_single_variance: bool = False) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes())
        self._constants = Constants(has_single_variance=has_single_variance)
        self._written = _written(graph, self._nodes)
        self._inputs = [value.debugName() for value in graph.inputs()]
        self._types = frozenset(kind for kind in ROUNDINGS if any(_makes(node, kind) for node in self._nodes))
        self._fixed: set[str] = set()

    def findings(
        self, given: Sequence[Range], *, checked_above: float = inf, types: frozenset[int] = frozenset()
    ) -> Findings:
        """What holds for inputs in these ranges.

        `checked_above`: where a factor of a product may be NaN or larger, or the product would overflow, the factor
        is checked at run time. `types`: HALF and BFLOAT16, as far as inputs are of them.
        """
        known = dict(zip(self._inputs, given, strict=True))
        checks: dict[str, None] = {}
        self._fixed = set()
        precision = NumberFormats.of(self._types | types)
        for node in self._nodes:
            outputs = [value.debugName() for value in node.outputs()]
            names = [value.debugName() for value in node.inputs()]
            is_fixed = self._is_fixed(node, names)
            if is_fixed:
                self._fixed.update(outputs)
            if node.kind() == "prim::Constant":
                found = None if node.mustBeNone() else self._constants.range_of(outputs[0], node.output().toIValue())
                known |= {} if found is None else {outputs[0]: rounded(found)}
                continue
            result = self._result(node, known)
            if checked_above < inf:
                result = self._with_checks(node, known, result, checks, checked_above)
            for position, name in enumerate(outputs):
                own = precision.applied(node, self._of_output(node, position, result, known))
                known[name] = ANYTHING if name in self._written else fixed(own) if is_fixed else own
        return Findings(ranges=known, checks=tuple(checks))

    def _is_fixed(self, node: Any, names: list[str]) -> bool:
        relevant = names[1:] if kind_of(node) in SHAPE_ONLY else names
        return self._fixed.issuperset(relevant) and not any(node.blocks())

    def _result(self, node: Any, known: Mapping[str, Range]) -> Range:
        rule = RULES.get(kind_of(node))
        if rule is not None and not any(node.blocks()):
            return rule(GraphOperation(node, known, self._fixed, self._constants))
        if node.kind() in ("prim::ListUnpack", "prim::TupleUnpack"):
            return known.get(node.inputsAt(0).debugName(), ANYTHING)
        return ANYTHING

    def _of_output(self, node: Any, position: int, first: Range, known: Mapping[str, Range]) -> Range:
        """The range of the result at this position, of which the first one is known."""
        kind = kind_of(node)
        if not position or kind in ALIKE:
            return first
        if kind in WITH_MEANS:
            return RULES["mean"](GraphOperation(node, known, self._fixed, self._constants))
        return WHOLE if kind in WITH_POSITIONS else ANYTHING

    def _with_checks(
        self, node: Any, known: dict[str, Range], result: Range, checks: dict[str, None], above: float
    ) -> Range:
        """The range of a product whose factors are checked where needed. Effect: adds to `checks`, narrows `known`."""
        changed = False
        for place in CHECKABLE.get(kind_of(node), ()):
            value = node.inputsAt(place)
            name = value.debugName()
            own = known.get(name, ANYTHING)
            needed = own.nan or own.largest > above or (result.nan and own.largest > CHECKED)
            if needed and not own.masked and name not in self._fixed and name not in self._inputs:
                checks[name] = None
                known[name] = replace(own, low=max(own.low, -CHECKED), high=min(own.high, CHECKED), nan=False)
                changed = True
        return self._result(node, known) if changed else result


@record
class NumberFormats:
    """Of a graph: from where on numbers are infinite, and what others are rounded to."""

    overflow: float
    roundings: tuple[Rounding, ...]

    @staticmethod
    def of(types: frozenset[int]) -> NumberFormats:
        """Of a graph in fp32 and these types."""
        roundings = (to_fp32, *(ROUNDINGS[kind] for kind in sorted(types)))
        return NumberFormats(overflow=HALF_OVERFLOW if HALF in types else OVERFLOW, roundings=roundings)

    def applied(self, node: Any, result: Range) -> Range:
        """The range of a result. Sums that overflow may be NaN: parts of them may have both signs."""
        own = rounded(result, self.overflow, self.roundings)
        lost = kind_of(node) in SUMS and own.may_be_infinite and not result.may_be_infinite
        return replace(own, nan=True) if lost else own


def _writes(node: Any) -> bool:
    """Whether the operation changes its first tensor in place."""
    return node.kind().endswith("_") and not node.kind().endswith("__")


def _written(graph: Any, nodes: list[Any]) -> frozenset[str]:
    """The names of values whose memory is changed in place, perhaps by way of another value."""
    if not any(map(_writes, nodes)):
        return frozenset()
    memory = graph.alias_db()
    tensors = (value for node in nodes for value in node.outputs() if value.type().kind() == "TensorType")
    return frozenset(value.debugName() for value in tensors if memory.has_writers(value))


NAMES = {HALF: ("torch.float16", "half"), BFLOAT16: ("torch.bfloat16", "bfloat16")}
"""By type: its name, and the operation that converts to it."""


def _makes(node: Any, kind: int) -> bool:
    """Whether the operation converts to this type, or is a constant of it."""
    name, conversion = NAMES[kind]
    if node.kind() == "prim::Constant":
        value = constant_of(node.output())
        return isinstance(value, Tensor) and str(value.dtype) == name
    if kind_of(node) == conversion:
        return True
    return kind_of(node) in ("to", "_to_copy") and any(
        type(number) is int and number == kind for number in map(constant_of, list(node.inputs())[1:3])
    )
