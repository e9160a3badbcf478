"""Calls that make the program wait for the GPU in every training step."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import (
    inside,
    is_unconditional,
    moves_to_gpu,
    nearest_loop,
    root_name,
    training_loops,
)
from cpulaunch.check.source.program import ParsedProgram, method, receiver

READS = ("item", "tolist", "cpu", "numpy")
EMPTY = ("torch.cuda.empty_cache", "torch.cuda.synchronize")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Reads of the loss, and empty_cache or synchronize, in every turn of a training loop that moves data to a GPU."""
    for loop in training_loops(program):
        body = list(inside(program, loop))
        if not any(moves_to_gpu(program, node) for node in body):
            continue
        losses = {root_name(receiver(node)) for node in body if method(node) == "backward"} - {""}
        for node in body:
            if not isinstance(node, ast.Call) or nearest_loop(program, node) is not loop:
                continue
            if not is_unconditional(program, node, loop):
                continue
            name = program.called(node)
            if name in EMPTY:
                yield Hit(node=node, seen=f"{name} in every training step")
            elif method(node) in READS and root_name(receiver(node)) in losses and not _is_inner(program, node):
                yield Hit(node=node, seen=f"{ast.unparse(node)} waits for the GPU in every training step")


def _is_inner(program: ParsedProgram, node: ast.Call) -> bool:
    """Whether another read follows, as in loss.detach().cpu().item(): one finding is enough."""
    parent = program.parents[node]
    return isinstance(parent, ast.Attribute) and parent.attr in READS


def _loop(last: str, *, gpu: str = "x.cuda()") -> str:
    head = "for i, x in enumerate(loader):\n    loss = net"
    return f"{head}({gpu}).sum()\n    loss.backward()\n    opt.step()\n    {last}\n"


RULE = Rule(
    id="step-synchronization",
    summary="Every training step waits for the GPU",
    why="loss.item() and the like wait until the GPU has finished the step; only then does Python start to launch the "
    "next one, and the GPU idles. empty_cache also returns memory that the next step asks for again.",
    fix="Add up loss.detach() on the GPU and read it every n steps; leave out empty_cache and synchronize.",
    find=find,
    wrong=(
        _loop("total += loss.item()  # <-"),
        _loop("losses.append(loss.detach().cpu())  # <-"),
        _loop("print(i, loss.item())  # <-"),
        _loop("torch.cuda.empty_cache()  # <-"),
        _loop("total += loss.item()  # <-", gpu="x.to('cuda')"),
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        + _loop("bar.set_postfix(loss=loss.item())  # <-", gpu="x.to(device)"),
    ),
    right=(
        _loop("total += loss.detach()"),
        _loop("total += loss.item()", gpu="x"),
        _loop("total += loss.item()", gpu="x.to(device)"),
        _loop("if i % 100 == 0:\n        print(loss.item())"),
        _loop("total += other.item()"),
        _loop("pass") + "print(loss.item())\n",
        "for x in loader:\n    loss = net(x.cuda())\n    total += loss.item()\n",
        "device = torch.device('cpu')\n" + _loop("total += loss.item()", gpu="x.to(device)"),
        _loop("log(lambda: loss.item())"),
        _loop("count += x.size(0)"),
        "def step(loss):\n    loss.backward()\n    return loss.item()\n",
    ),
)
