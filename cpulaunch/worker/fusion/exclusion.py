"""Operations that oneDNN Graph must not see: they run as torch's own, inside the same TorchScript graph.

oneDNN Graph looks at the operations of a graph's outermost block only. An operation that must stay out of its sight is
moved into a conditional block whose condition is always true, which torch does not know until the graph runs.
Source: torch/csrc/jit/codegen/onednn/graph_helper.cpp (createOperator), prepare_binary.cpp, interface.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cpulaunch.worker.fusion.portable import OPERANDS, PortableGraph, function_of, graph_of

FUSIBLE = frozenset(
    f"aten::{name}"
    for name in (
        *("conv2d", "_convolution", "convolution", "batch_norm", "layer_norm", "addmm", "mm", "bmm", "matmul"),
        *("linear", "add", "mul", "div", "tanh", "relu", "elu", "sigmoid", "gelu", "round", "exp", "sqrt", "abs"),
        *("square", "clamp", "hardtanh", "hardswish", "log", "leaky_relu", "relu6", "softmax", "_softmax", "silu"),
        *("log_softmax", "_log_softmax", "cat", "max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "permute"),
        *("contiguous", "add_", "mul_", "tanh_", "elu_", "relu_", "relu6_", "gelu_", "sqrt_", "sigmoid_", "hardtanh_"),
        *("abs_", "square_", "pow_", "leaky_relu_", "round_", "exp_", "hardswish_", "silu_", "div_", "pow", "to"),
        *("type_as", "reciprocal", "mish", "softplus", "quantize_per_tensor", "quantize_per_channel", "dequantize"),
    )
)
"""Operations that oneDNN Graph, or the passes of torch that prepare its graphs, may replace."""

PRODUCTS = frozenset(
    f"aten::{name}" for name in ("conv2d", "_convolution", "convolution", "addmm", "mm", "bmm", "matmul", "linear")
)
"""Those of them that take most of the time."""

FLOATS = ("float32", "bfloat16")


def fusible(graph: Any) -> list[Any]:
    """The operations that oneDNN Graph may fuse, in the order of the graph."""
    return [node for node in graph.nodes() if node.kind() in FUSIBLE]


def has_foreign_operations(source: PortableGraph) -> bool:
    """Whether a library other than torch defines an operation of the graph, which other processes do not know."""
    return any(name not in ("aten", "prim", "prims") for name in re.findall(r" = (\w+)::\w", source.text))


def everything(source: PortableGraph) -> frozenset[int]:
    """The positions of all fusible operations: without these oneDNN Graph compiles nothing, so it cannot crash."""
    return frozenset(range(len(fusible(graph_of(source)))))


def leave_out(graph: Any, positions: Iterable[int]) -> None:
    """Effect: oneDNN Graph does not see the operations at these positions of `fusible`."""
    nodes = fusible(graph)
    chosen = [nodes[position] for position in sorted(positions)]
    if not chosen:
        return
    tensor = next(value for value in graph.inputs() if value.type().kind() == "TensorType")
    with graph.insert_point_guard(next(iter(graph.nodes()))):
        elements = graph.insert("aten::numel", [tensor])
        condition = graph.insert("aten::ge", [elements, graph.insertConstant(0)])
    for node in chosen:
        _hide_numbers(graph, node)
    left_out = {_name(node) for node in chosen}
    for run in _runs(graph, left_out):
        _move_into_block(graph, run, condition)


def _hide_numbers(graph: Any, node: Any) -> None:
    """Effect: torch does not see that the second operand is a fraction, if it is one, nor by what it is multiplied.

    In blocks, too, it would make tensors of these, of the type of the first operand: 0.5 would become the integer 0.
    Source: torch/csrc/jit/codegen/onednn/prepare_binary.cpp.
    """
    if node.kind() not in ("aten::add", "aten::mul", "aten::div"):
        return
    numbers = {1: _constant(node.inputsAt(1))}
    if node.kind() == "aten::add" and node.inputsSize() > 2 and _constant(node.inputsAt(2)) != 1:
        numbers[2] = _constant(node.inputsAt(2))
    for place, number in numbers.items():
        if isinstance(number, float) or (place == 2 and type(number) is int):
            with graph.insert_point_guard(node):
                hidden = graph.insertConstant(number)
            hidden.setType(torch._C.NumberType.get())
            node.replaceInput(place, hidden)


def _name(node: Any) -> str | None:
    """The name of the first result, by which nodes are compared; None if there is none."""
    return next((value.debugName() for value in node.outputs()), None)


def _runs(graph: Any, left_out: set[str | None]) -> list[list[Any]]:
    """Neighbours that oneDNN Graph must not see, with what is between them; a block for each would take seconds."""
    runs: list[list[Any]] = []
    run: list[Any] = []
    length = 0
    for node in graph.nodes():
        if node.kind() == "prim::Constant":
            continue
        is_chosen = _name(node) in left_out
        if not is_chosen and (node.kind() in FUSIBLE or next(node.blocks(), None) is not None):
            runs.append(run[:length])
            run, length = [], 0
        elif is_chosen or run:
            run.append(node)
            length = len(run) if is_chosen else length
    return [run for run in [*runs, run[:length]] if run]


def _move_into_block(graph: Any, run: list[Any], condition: Any) -> None:
    """Effect: the constants that the operations of the run take are before the block."""
    branch = graph.create("prim::If", [condition], 0)
    branch.insertBefore(run[0])
    taken, never = branch.addBlock(), branch.addBlock()
    for node in run:
        for source in [value.node() for value in node.inputs()]:
            if source.kind() == "prim::Constant" and source.isAfter(branch):
                source.moveBefore(branch)
        node.moveBefore(taken.returnNode())
    for value in [value for node in run for value in node.outputs()]:
        if not any(use.user.isAfter(branch) for use in value.uses()):
            continue
        result = branch.addOutput()
        result.setType(value.type())
        value.replaceAllUsesAfterNodeWith(branch, result)
        taken.registerOutput(value)
        nothing = graph.create("prim::Uninitialized", [], 1)
        nothing.insertBefore(never.returnNode())
        nothing.output().setType(value.type())
        never.registerOutput(nothing.output())


def misread(graph: Any) -> frozenset[int]:
    """The positions of operations of which oneDNN Graph, as torch uses it, ignores an argument that matters."""
    return frozenset(index for index, node in enumerate(fusible(graph)) if _is_misread(node))


def _is_misread(node: Any) -> bool:
    kind, inputs = node.kind().removeprefix("aten::").removesuffix("_"), list(node.inputs())
    if kind == "gelu":  # Computed by the error function, whatever the argument says.
        return len(inputs) < 2 or _constant(inputs[1]) != "none"
    if kind == "div":  # The rounding mode is ignored.
        return len(inputs) > 2
    if kind == "round":  # So is the number of decimals,
        return len(inputs) > 1
    if kind == "elu":  # and both scales.
        return any(_constant(value) != 1 for value in inputs[2:4])
    if kind == "clamp":  # Bounds must be numbers.
        return any(_constant(value, missing="") == "" for value in inputs[1:3])
    if kind == "layer_norm":
        return any(_is_none(value) for value in inputs[2:4])
    if kind == "batch_norm":
        return any(_is_none(value) for value in inputs[1:5])
    if kind in ("softmax", "log_softmax"):  # The dtype of the result is ignored.
        return not _is_none(inputs[2])
    return False


def _is_none(value: Any) -> bool:
    return bool(value.node().mustBeNone())


def _constant(value: Any, missing: object = None) -> Any:
    """The value of a constant that is no tensor; `missing` if it is none."""
    if value.node().kind() != "prim::Constant" or value.type().kind() == "TensorType":
        return missing
    return None if _is_none(value) else value.toIValue()


def _observe(graph: Any) -> list[list[int]]:
    """For each fusible operation, the places of its tensors among the outputs of the graph: inputs, then results.

    Effect: the graph's only output becomes a list of these tensors.
    """
    places: dict[str, int] = {}
    values: list[Any] = []
    operations = []
    for node in fusible(graph):
        own = []
        for value in (*node.inputs(), *node.outputs()):
            if value.type().kind() != "TensorType":
                continue
            if places.setdefault(value.debugName(), len(values)) == len(values):
                values.append(value)
            own.append(places[value.debugName()])
        operations.append(own)
    for index in reversed(range(len(list(graph.outputs())))):
        graph.eraseOutput(index)
    result = graph.create("prim::ListConstruct", values, 1)
    result.output().setType(torch._C.ListType(torch._C.TensorType.get()))
    graph.appendNode(result)
    graph.registerOutput(result.output())
    return operations


def observed_kinds(source: PortableGraph, inputs: list[Any]) -> dict[str, Any]:
    """Per operation a text of its kind, shapes and types, and one of its kind and of what its operands are.

    The latter differs for each product: one of another shape is not to be left out with it. And the positions of those
    with types that are not fused, or with operands that oneDNN Graph takes for others.
    """
    graph = graph_of(source)
    operations = fusible(graph)
    unread = misread(graph)
    names = [node.kind() for node in operations]
    sources = [" ".join([node.kind(), *(value.node().kind() for value in node.inputs())]) for node in operations]
    operands = [str(place) if names[place] in PRODUCTS else text for place, text in enumerate(sources)]
    observed = _observe(graph)
    with torch.no_grad():
        tensors = function_of(graph)(*inputs)
    signatures, other = [], []
    of_rows: set[int] = set()
    for position, (name, places) in enumerate(zip(names, observed, strict=True)):
        own = [tensors[place] for place in places]
        signatures.append(" ".join([name, *(f"{tensor.dtype}{list(tensor.shape)}" for tensor in own)]))
        has_rows = _is_product_of_rows(name, own) if name in PRODUCTS else not of_rows.isdisjoint(places)
        is_other = any(str(tensor.dtype).removeprefix("torch.") not in FLOATS for tensor in own)
        if is_other or (name in OPERANDS and not all(_is_taken_as_it_is(tensor, own[-1], has_rows) for tensor in own)):
            other.append(position)
        elif has_rows:
            of_rows.add(places[-1])
    return {"signatures": signatures, "operands": operands, "misread": sorted(unread), "others": other}


def _is_product_of_rows(name: str, own: list[Tensor]) -> bool:
    """Whether oneDNN Graph makes one matrix of all rows of the first factor, as the second one is a matrix."""
    return name == "aten::linear" or (name == "aten::matmul" and own[1].dim() == 2)


def _is_taken_as_it_is(operand: Tensor, result: Tensor, has_rows: bool) -> bool:
    return _is_laid_out_as(operand, result) and not (has_rows and _is_for_some_rows(operand, result))


def _is_for_some_rows(operand: Tensor, result: Tensor) -> bool:
    """Whether it has several rows, but fewer than the result, which are taken for those of one matrix.

    Seen with torch 2.13: linear(x) + y[:, :1, :1]; of three dimensions, y[:, :1] is right.
    """
    if result.dim() == 3 and operand.dim() and operand.shape[-1] == result.shape[-1] > 1:
        return False
    places = [place for place in range(-result.dim(), -1) if result.shape[place] > 1]
    has = [operand.dim() >= -place and operand.shape[place] > 1 for place in places]
    return any(has) and not all(has)


def _is_laid_out_as(operand: Tensor, result: Tensor) -> bool:
    """Whether the dimensions that both have are in the same order in memory.

    oneDNN Graph takes an operand beside a product as laid out like that. Seen with torch 2.13: linear(x) + y.mT.
    """
    own = dict(zip(range(-operand.dim(), 0), zip(operand.shape, operand.stride(), strict=True), strict=True))
    shared = [place for place, (size, stride) in own.items() if size > 1 and stride and result.shape[place] > 1]
    by_operand = sorted(shared, key=lambda place: -operand.stride(place))
    return by_operand == sorted(shared, key=lambda place: -result.stride(place))
