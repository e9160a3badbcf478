"""Operations whose result's size the program must wait for, in every training step on a GPU."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import (
    inside,
    is_from_gpu,
    is_in_test,
    is_unconditional,
    moves_to_gpu,
    names_on_gpu,
    nearest_loop,
    training_loops,
)
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, method, receiver

REDUCTIONS = ("mean", "sum")
SELECTIONS = ("masked_select", "nonzero", "unique")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """nonzero, masked_select and unique of what a training loop moved to a GPU, in every turn."""
    for loop in training_loops(program):
        body = list(inside(program, loop))
        if not any(moves_to_gpu(program, node) for node in body) or is_in_test(program, loop):
            continue
        names = names_on_gpu(program, loop)
        for node in body:
            if (
                isinstance(node, ast.Call)
                and nearest_loop(program, node) is loop
                and is_unconditional(program, node, loop)
            ):
                name = _selection(program, node)
                if name and is_from_gpu(program, _selected(program, node), names):
                    yield Hit(node=node, seen=f"{name} waits for the GPU in every training step")


def _selection(program: ParsedProgram, call: ast.Call) -> str:
    """The name of an operation whose result's size depends on data; "" if a call is none."""
    called = program.called(call)
    if called in {f"torch.{name}" for name in SELECTIONS}:
        return called
    if called == "torch.where" and len(call.args) == 1 and not call.keywords:
        return "torch.where with one argument"
    is_method = method(call) in SELECTIONS and not called and _is_tensor(program, receiver(call))
    return f"{method(call)}()" if is_method and not is_constant(argument(call, "as_tuple"), 0) else ""


def _selected(program: ParsedProgram, call: ast.Call) -> ast.expr | None:
    """What a selection is made of."""
    return call.args[0] if program.called(call) and call.args else receiver(call)


def _is_tensor(program: ParsedProgram, node: ast.AST | None) -> bool:
    """Whether what a method is called on is no other library's object, as far as names tell."""
    root = node
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    name = program.dotted(root)
    return not name or name == "torch"


def _loop(line: str, gpu: str = "x.cuda()") -> str:
    return f"for x, y in loader:\n    loss = net({gpu})\n    {line}\n    loss.sum().backward()\n    opt.step()\n"


RULE = Rule(
    id="data-dependent-shapes",
    summary="Every training step waits for the size of a result",
    why="The size of what nonzero, masked_select, unique and where(condition) return depends on the values. The "
    "program waits until the GPU has computed it, and launches nothing meanwhile.",
    fix="Multiply by the mask, or use torch.where(mask, x, 0): (loss * mask).sum() / mask.sum() instead of "
    "loss.masked_select(mask).mean().",
    find=find,
    wrong=(
        _loop("loss = loss.masked_select(mask).mean()  # <-"),
        _loop("loss = torch.masked_select(loss, y.cuda() > 0)  # <-"),
        _loop("index = (y.cuda() != 0).nonzero()  # <-"),
        _loop("index = torch.nonzero(loss, as_tuple=True)  # <-"),
        _loop("index = torch.where(loss > 0)  # <-"),
        _loop("classes = torch.unique(loss.argmax(1))  # <-", gpu="x.to('cuda')"),
        _loop("x, y = x.cuda(), y.cuda()\n    index = torch.nonzero(y)  # <-"),
    ),
    right=(
        _loop("loss = (loss * mask).sum() / mask.sum()"),
        _loop("loss = torch.where(mask, loss, 0.0)"),
        _loop("index = (y != 0).nonzero()", gpu="x"),
        _loop("if step % 100 == 0:\n        print(torch.unique(y))"),
        _loop("pass") + "print(torch.unique(y))\n",
        "import numpy as np\n" + _loop("index = np.nonzero(y)"),
        "import numpy as np\n" + _loop("index = np.asarray(y).nonzero()"),
        "def f(y):\n    return y.nonzero()\n",
        "for x, y in loader:\n    net(x.cuda())\n    print(y.nonzero())\n",
        _loop("log(lambda: y.nonzero())"),
        _loop("classes = torch.unique(y)"),
        _loop("classes = torch.unique(loss.cpu())"),
        _loop("classes = table['class'].unique()"),
        _loop("mask = y.ne(0)"),
        "from mine import unique\n" + _loop("classes = unique(y)"),
    ),
)
