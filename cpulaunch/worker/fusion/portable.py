"""A frozen TorchScript graph as text and a list of constants, from which the same graph is built in any process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpulaunch.records.record import record, replace

WRITTEN_OUT = ("IntType", "BoolType")
"""Types of constants that the text contains. Others, such as an infinite float, cannot all be parsed again."""

Function = Callable[..., tuple[Tensor, ...]]


@record
class PortableGraph:
    """A graph as text. Its first `inputs` inputs are those of the graph, the others stand for `constants`, in order."""

    text: str
    inputs: int
    constants: tuple[Any, ...]


def portable(frozen: Any) -> PortableGraph:
    """The graph of a frozen module, without writes to tensors where these can be avoided.

    An operation in place may write to a constant: TorchScript replaces x + 0 by x, even if the sum is then changed.
    """
    graph = frozen.graph.copy()
    module = next(graph.inputs(), None)
    if module is not None and not module.uses() and module.type().kind() == "ClassType":
        graph.eraseInput(0)
    torch._C._jit_pass_remove_mutation(graph)
    torch._C._jit_pass_constant_propagation(graph)
    _copy_unchanged(graph)
    inputs = len(list(graph.inputs()))
    _keep_number_results(graph)
    _split_lists(graph)
    constants = tuple(_move_constants(graph))
    return PortableGraph(text=_plain_text(graph), inputs=inputs, constants=constants)


NEUTRAL = {"aten::add": 0, "aten::sub": 0, "aten::mul": 1, "aten::div": 1}
"""Operations, and the number beside which TorchScript omits them."""


def _copy_unchanged(graph: Any) -> None:
    """Effect: x + 0 and the like are copied where the graph writes to tensors: TorchScript makes x of them in any case,
    so that what changes the sum would change x, which may be an input.
    """
    if not _writes(graph):
        return
    for node in [node for kind in NEUTRAL for node in graph.findAllNodes(kind)]:
        result, operands = node.output(), list(node.inputs())[:2]
        if result.type().kind() == "TensorType" and NEUTRAL[node.kind()] in map(_constant_number, operands):
            with graph.insert_point_guard(node):
                copy = graph.create("aten::clone", [result, graph.insertConstant(None)], 1)
            copy.insertAfter(node)
            copy.output().setType(result.type())
            result.replaceAllUsesAfterNodeWith(copy, copy.output())


def _writes(block: Any) -> bool:
    """Whether an operation changes a tensor: in place, as add_ and __ior__, or by `out`."""
    return any("!" in node.schema() or any(map(_writes, node.blocks())) for node in block.nodes())


def _constant_number(value: Any) -> Any:
    """A constant that is no tensor, or the element of one with one element; None for any other value."""
    constant = value.toIValue() if value.node().kind() == "prim::Constant" else None
    if not isinstance(constant, Tensor):
        return constant
    return constant.item() if constant.numel() == 1 else None


def _keep_number_results(graph: Any) -> None:
    """Effect: results that TorchScript has made numbers, as it does with those in an operation, are tensors again."""
    node = next(iter(graph.outputs())).node()
    if node.kind() != "prim::TupleConstruct":
        return
    for index, value in enumerate(list(node.inputs())):
        if value.node().kind() != "prim::Constant" or value.type().kind() != "TensorType":
            continue
        if not isinstance(number := value.toIValue(), Tensor):
            with graph.insert_point_guard(node):
                node.replaceInput(index, graph.insertConstant(torch.tensor(number, dtype=value.type().dtype())))


def _split_lists(graph: Any) -> None:
    """Effect: constant lists of tensors become lists of constants, because a list has no text that can be parsed.

    Where the graph writes to tensors, those that it takes out of such a list are copied first, as the parts of the
    product with a GRUCell's zeros.
    """
    is_writing = _writes(graph)
    for node in graph.findAllNodes("prim::Constant"):
        if node.mustBeNone() or node.output().type().kind() != "ListType":
            continue
        items = node.output().toIValue()
        if not any(isinstance(item, Tensor) for item in items):
            continue
        with graph.insert_point_guard(node):
            values = [graph.insertConstant(item) for item in items]
            if is_writing and any(use.user.kind() == "prim::ListUnpack" for use in node.output().uses()):
                values = [graph.insert("aten::clone", [value]) for value in values]
        new = graph.create("prim::ListConstruct", values, 1)
        new.insertBefore(node)
        new.output().setType(node.output().type())
        node.output().replaceAllUsesWith(new.output())
        node.destroy()


def _move_constants(graph: Any) -> list[Any]:
    """The values of the constants that the text cannot contain. Effect: they become inputs, in this order."""
    values = []
    for node in graph.findAllNodes("prim::Constant"):
        if node.mustBeNone():
            continue
        output = node.output()
        kind = output.type().kind()
        value = output.toIValue()
        if kind in WRITTEN_OUT or (kind == "ListType" and all(type(item) is int for item in value)):
            continue
        moved = graph.addInput()
        moved.setType(torch._C.TensorType.get() if isinstance(value, Tensor) else output.type())
        output.replaceAllUsesWith(moved)
        node.destroy()
        values.append(value)
    return values


def _plain_text(graph: Any) -> str:
    """The graph as text, without the names of scopes, which cannot be parsed."""
    return re.sub(r", scope: [^\n]*$", "", graph.str(False), flags=re.MULTILINE)


def graph_of(source: PortableGraph) -> Any:
    """A new graph with the constants in their places."""
    graph = torch._C.parse_ir(source.text)
    moved = list(graph.inputs())[source.inputs :]
    if moved:
        with graph.insert_point_guard(next(iter(graph.nodes()), graph.return_node())):
            for value, constant in zip(moved, source.constants, strict=True):
                value.replaceAllUsesWith(graph.insertConstant(constant))
    for index in reversed(range(source.inputs, source.inputs + len(moved))):
        graph.eraseInput(index)
    return graph


def results_of(graph: Any) -> list[Any]:
    """The results of all operations, in the order of the graph, which does not depend on where constants are."""
    return [value for node in graph.nodes() if node.kind() != "prim::Constant" for value in node.outputs()]


def with_results(source: PortableGraph, places: Sequence[int]) -> PortableGraph:
    """The graph with these ones of `results_of` behind its own results, all in a tuple."""
    if not places:
        return source
    graph = torch._C.parse_ir(source.text)
    values, result = results_of(graph), next(iter(graph.outputs()))
    is_tuple = result.node().kind() == "prim::TupleConstruct"
    own = [*(result.node().inputs() if is_tuple else [result]), *(values[place] for place in places)]
    joined = graph.create("prim::TupleConstruct", own, 1)
    joined.output().setType(torch._C.TupleType([value.type() for value in own]))
    graph.appendNode(joined)
    graph.eraseOutput(0)
    graph.registerOutput(joined.output())
    return replace(source, text=_plain_text(graph))


def function_of(graph: Any) -> Function:
    """A function that runs the graph; torch optimizes it at its second call."""
    made: Function = torch._C._create_function_from_graph("forward", graph)
    return made


OPERANDS = ("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::div", "aten::div_")
"""Operations beside which oneDNN Graph cannot take a constant tensor, such as a layer scale or a bias.

Seen with torch 2.13: beside the result of linear it raises "vector::_M_range_check" when it is compiled, except for a
tensor without dimensions as the second operand.
"""


def fusible_function_of(graph: Any) -> Function:
    """A function like that of `function_of`, in which constant operands do not keep oneDNN Graph from compiling.

    Effect: changes the graph.
    """
    for node in [node for kind in ("aten::add", "aten::mul") for node in graph.findAllNodes(kind)]:
        _put_number_second(node)
    constants: list[Tensor] = []
    moved: dict[str, Any] = {}
    for node in [node for node in graph.nodes() if node.kind() in OPERANDS]:
        for index, value in enumerate(list(node.inputs())[:2]):
            constant = _constant_tensor(value)
            if constant is None or constant.dim() == 0:
                continue
            if value.debugName() not in moved:
                moved[value.debugName()] = graph.addInput()
                moved[value.debugName()].setType(torch._C.TensorType.get())
                constants.append(constant)
            node.replaceInput(index, moved[value.debugName()])
    function = function_of(graph)
    return (lambda *inputs: function(*inputs, *constants)) if constants else function


def _put_number_second(node: Any) -> None:
    """Effect: a constant without dimensions is the second operand of a product or sum.

    Also in blocks: beside a tensor of fewer bits, torch would make the result as wide as the first operand.
    """
    first, second, *scale = node.inputs()
    constant = _constant_tensor(first)
    if constant is None or constant.dim() or constant.dtype is torch.bool or second.type().kind() != "TensorType":
        return
    if node.kind() == "aten::mul" or scale[0].toIValue() == 1:
        node.replaceInput(0, second)
        node.replaceInput(1, first)


def _constant_tensor(value: Any) -> Tensor | None:
    constant = value.toIValue() if value.node().kind() == "prim::Constant" else None
    return constant if isinstance(constant, Tensor) else None
