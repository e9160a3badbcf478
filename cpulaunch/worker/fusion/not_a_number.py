"""Operations that must not be fused because they would make a number of NaN, or of infinity, that another one may make.

oneDNN computes maxima and exponentials in an order in which NaN is lost: a fused relu gives 0 for it. Whether NaN may
reach an operation is found out from the ranges of values in the graph: the root of a square cannot make it, the
logarithm of an input can, and so can any sum of what may overflow. Checks at run time narrow the ranges: of the inputs,
and of a few values in between, whose graph then gives them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from cpulaunch.records.record import record
from cpulaunch.worker.fusion.exclusion import fusible
from cpulaunch.worker.fusion.portable import PortableGraph, graph_of, results_of, with_results
from cpulaunch.worker.fusion.ranges.analysis import BFLOAT16, CHECKED, HALF, Analysis
from cpulaunch.worker.fusion.ranges.interval import (
    ANYTHING,
    BOOLEAN,
    OVERFLOW,
    WHOLE,
    Range,
    symmetric,
)
from cpulaunch.worker.fusion.ranges.operation import kind_of
from cpulaunch.worker.fusion.ranges.sums import LARGEST_SQUARED

SOFTMAX = frozenset({"softmax", "_softmax"})
"""With other operations behind them, these keep NaN only at its own place in the row: infinity makes it, too."""

LOSING = frozenset({"relu", "relu6", "hardtanh", "clamp", "exp", "max_pool2d", "max_pool2d_with_indices"}) | SOFTMAX
"""Found with torch 2.13, by trying all fusible operations behind linear and conv2d, with each instruction set, and
before other ones."""

OVERFLOWING = {"hardswish": OVERFLOW / 6, "layer_norm": LARGEST_SQUARED}
"""torch's own operations overflow for what is larger, to infinity or NaN; fused ones do not."""

LOSING_LOWEST = frozenset({"max_pool2d", "max_pool2d_with_indices"})
"""These give the lowest number where all elements are -infinity."""

ATTENTION = "scaled_dot_product_attention"
"""torch's kernel gives numbers where scores overflow to infinity, unlike those that nn.MultiheadAttention uses in eager
calls in eval mode. Seen with torch 2.13."""

CHECKED_ABOVE = (1e28, 1e12)
"""From which magnitude on a factor of a product is checked, in the order of trial, where NaN is lost without checks."""

MAX_CHECKS = 32
"""Values inside a graph that are checked; each has to be read once more."""

LARGE = 1 << 16
"""Elements from which on several threads find the extremes of a tensor sooner than one adds up its squares."""

MAX_RELAXED = 8
"""Of more inputs each one is checked: to find out which ones need it takes time."""

ONE = Range(low=0.0, high=1.0)
"""Of a mask."""

LOWEST = float(torch.finfo(torch.float32).min)
"""What masks that are added hold where they hide something, unless it is -infinity."""

UNCHECKED = (ANYTHING, WHOLE, BOOLEAN)
"""What any input is in."""

TYPES = {torch.float16: HALF, torch.bfloat16: BFLOAT16}
"""The types of inputs that round more than fp32 does."""

ROOM = 100.0
"""By this factor an input may be larger than the one of the capture, at least."""


@record
class InputCheck:
    """The input at this place must be in the range. It is NaN or infinite only where the range is without bounds."""

    place: int
    range: Range

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the input of a call is in the range."""
        tensor, bounds = inputs[self.place], self.range
        if not tensor.numel():
            return True
        if bounds.low == -bounds.high and tensor.is_floating_point():
            return is_small(tensor)
        low, high = torch.aminmax(tensor)
        return bool(low.item() >= bounds.low and high.item() <= bounds.high)  # NaN is neither.


@record
class Safeguards:
    """What keeps NaN from being lost in a graph.

    `left_out`: positions of operations that are not fused. `checks`: of inputs. `graph`: the graph, which gives
    `watched` values besides its results; `is_small` must hold for each.
    """

    left_out: frozenset[int]
    checks: tuple[InputCheck, ...]
    graph: PortableGraph
    watched: int = 0


def is_small(tensor: Tensor) -> bool:
    """Whether no element is NaN, infinite, or larger than CHECKED.

    In one pass in which nothing cancels: of small tensors, the root of the sum of squares is compared, in one thread;
    of large ones the extremes, in all threads.
    """
    value = tensor.detach()
    is_narrow = value.dtype not in (torch.float32, torch.float64)  # Their norms are computed a hundred times slower.
    if value.numel() and (is_narrow or value.numel() >= LARGE) and not value.is_complex():
        low, high = torch.aminmax(value)
        return bool(low.item() >= -CHECKED and high.item() <= CHECKED)  # NaN is neither.
    if value.dtype is torch.float32 and value.is_contiguous():
        flat = value.view(-1)
        return bool(torch.dot(flat, flat).item() <= CHECKED * CHECKED)
    return not value.numel() or bool(torch.linalg.vector_norm(value).item() <= CHECKED)


def safeguards(
    source: PortableGraph,
    examples: Sequence[Tensor],
    *,
    has_single_variance: bool = False,
    replaces_attention: bool = False,
) -> Safeguards:
    """What the graph needs so that no call with inputs like these loses NaN. `examples`: the inputs of one call.

    `replaces_attention`: see ATTENTION.
    """
    graph = graph_of(source)
    operations = fusible(graph)
    losing = {
        position: node for position, node in enumerate(operations) if kind_of(node) in LOSING | OVERFLOWING.keys()
    }
    if replaces_attention:
        others = [node for node in graph.nodes() if kind_of(node) == ATTENTION]
        losing |= {len(operations) + index: node for index, node in enumerate(others)}
    if not losing:
        return Safeguards(left_out=frozenset(), checks=(), graph=source)
    search = _Search(graph, losing, examples, has_single_variance)
    given = search.given()
    above, names, left_out = search.checked_values(given)
    given = search.relaxed(given, above, left_out)
    checks = [InputCheck(place=place, range=each) for place, each in enumerate(given) if each not in UNCHECKED]
    watched = search.places(names)
    left_out = frozenset(position for position in left_out if position < len(operations))
    return Safeguards(
        left_out=left_out, checks=tuple(checks), graph=with_results(source, watched), watched=len(watched)
    )


def _assumed(example: Tensor) -> Range:
    """The narrowest range assumed of an input like this one."""
    if example.dtype is torch.bool:
        return BOOLEAN
    if example.is_complex() or not example.numel():
        return ANYTHING if example.is_floating_point() or example.is_complex() else WHOLE
    low, high = (float(bound) for bound in torch.aminmax(example.detach()))
    if low >= 0 and high <= 1 and bool(((example == 0) | (example == 1)).all()):
        return ONE
    if not example.is_floating_point():
        return WHOLE
    if is_small(example.detach() * ROOM):
        return symmetric(CHECKED)
    is_masked = high * ROOM <= CHECKED  # NaN is not smaller.
    return Range(low=-inf if low == -inf else LOWEST, high=CHECKED) if is_masked else ANYTHING


def _wider(assumed: Range, example: Tensor) -> tuple[Range, ...]:
    """Wider ranges than the one assumed, the widest first."""
    if not example.is_floating_point():
        return () if assumed in UNCHECKED else (WHOLE,)
    return () if assumed in UNCHECKED else (ANYTHING, symmetric(CHECKED)) if assumed == ONE else (ANYTHING,)


class _Search:
    """The assumptions on inputs and the checks with which the fewest operations are left out."""

    def __init__(self, graph: Any, losing: dict[int, Any], examples: Sequence[Tensor], single: bool) -> None:
        self._graph = graph
        self._analysis = Analysis(graph, has_single_variance=single)
        self._losing = {position: (kind_of(node), _deciding(node)) for position, node in losing.items()}
        self._examples = examples
        self._types = frozenset(TYPES[each.dtype] for each in examples if each.dtype in TYPES)
        self._before_last = _values_before_last(graph, list(losing.values()))

    def given(self) -> list[Range]:
        """The narrowest range assumed of each input that the example is in."""
        return [_assumed(example) for example in self._examples]

    def lost(self, given: Sequence[Range], above: float) -> tuple[frozenset[int], tuple[str, ...]]:
        """The positions of operations that would lose NaN, and the names of values to be checked."""
        found = self._analysis.findings(given, checked_above=above, types=self._types)
        lost = frozenset(
            position
            for position, (kind, names) in self._losing.items()
            if any(_is_lost(kind, found.ranges.get(name, ONE)) for name in names)
        )
        return lost, tuple(name for name in found.checks if name in self._before_last)

    def checked_values(self, given: Sequence[Range]) -> tuple[float, tuple[str, ...], frozenset[int]]:
        """From where on values are checked, their names, and the operations that are left out all the same."""
        lost, names = self.lost(given, inf)
        best = (inf, names, lost)
        for above in CHECKED_ABOVE:
            if not best[2]:
                break
            lost, names = self.lost(given, above)
            if len(names) <= MAX_CHECKS and len(lost) < len(best[2]):
                best = (above, names, lost)
        return best

    def relaxed(self, given: list[Range], above: float, left_out: frozenset[int]) -> list[Range]:
        """The assumptions without those that change nothing."""
        _, names = self.lost(given, above)
        if len(given) > MAX_RELAXED:
            return given
        for place, example in enumerate(self._examples):
            for wider in _wider(given[place], example):
                tried = [*given[:place], wider, *given[place + 1 :]]
                if self.lost(tried, above) == (left_out, names):
                    given = tried
                    break
        return given

    def places(self, names: Sequence[str]) -> list[int]:
        """The places of values among the results of all operations."""
        order = [value.debugName() for value in results_of(self._graph)]
        return [order.index(name) for name in names]


def _is_lost(kind: str, given: Range) -> bool:
    """Whether an operation of this kind, fused, may lose NaN or infinity for what is in the range."""
    if kind in OVERFLOWING:
        return given.masked or given.largest > OVERFLOWING[kind]
    if kind in LOSING_LOWEST and (given.masked or given.low == -inf):
        return True
    return given.nan or (kind in SOFTMAX and given.high == inf)


def _deciding(node: Any) -> list[str]:
    """The names of the values that must not be NaN: what the operation is given, or the result of attention."""
    values = node.outputs() if kind_of(node) == ATTENTION else node.inputs()
    return [value.debugName() for value in values]


def _values_before_last(graph: Any, operations: list[Any]) -> frozenset[str]:
    """The names of the results of operations before the last one of these."""
    names: set[str] = set()
    before: frozenset[str] = frozenset()
    for node in graph.nodes():
        if node in operations:
            before = frozenset(names)
        names.update(value.debugName() for value in node.outputs())
    return before
