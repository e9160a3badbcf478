"""Gradients that are filled with zeros instead of dropped."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.flow import nearest_loop, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, method, receiver

GRAPHS = re.compile(r"CUDAGraph|cuda\.graph|graphed_callables|reduce-overhead|cudagraph")
"""Words of programs that replay captured steps, which need the gradients' memory to stay where it is."""
UNSAFE = "optimizers skip a parameter without a gradient, which momentum and weight decay would change"


def find(program: ParsedProgram) -> Iterator[Hit]:
    """zero_grad(set_to_none=False), and zeros written by hand to all gradients, in a training loop."""
    if GRAPHS.search(program.text):
        return
    loops = set(training_loops(program))
    for call in program.calls:
        if loops.isdisjoint(program.around(call)):
            continue
        if method(call) == "zero_grad" and is_constant(argument(call, "set_to_none", 0), False):
            if not _reads_gradients(program):
                edit = CallEdit(remove=("set_to_none",), unsafe=UNSAFE) if call.keywords else None
                yield Hit(node=call, seen="zero_grad(set_to_none=False) writes zeros to every gradient", edit=edit)
        elif _zeroes_by_hand(program, call):
            yield Hit(node=call, seen=f"{ast.unparse(call)} writes zeros to every gradient")


@lru_cache(maxsize=2)
def _reads_gradients(program: ParsedProgram) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in program.nodes)


def _zeroes_by_hand(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call is `p.grad.zero_()` for each p of a module's parameters."""
    gradient = receiver(call) if method(call) == "zero_" and not call.args else None
    if gradient is not None and method(gradient) == "detach":
        gradient = receiver(gradient)
    if isinstance(gradient, ast.Attribute) and gradient.attr == "data":
        gradient = gradient.value
    if not isinstance(gradient, ast.Attribute) or gradient.attr != "grad" or not isinstance(gradient.value, ast.Name):
        return False
    loop = nearest_loop(program, call)
    return (
        isinstance(loop, ast.For)
        and method(loop.iter) == "parameters"
        and isinstance(loop.target, ast.Name)
        and loop.target.id == gradient.value.id
    )


STEP = "for x in loader:\n    net(x).backward()\n    opt.step()\n"

RULE = Rule(
    id="zero-grad",
    summary="zero_grad writes zeros instead of dropping the gradients",
    why="With set_to_none=False each step writes zeros to every gradient, and backward then reads and adds to them. "
    "torch's default drops the gradients: backward writes them once. The rule is silent in programs with CUDA graphs, "
    "and for zero_grad in those that read .grad.",
    fix="Call zero_grad() without set_to_none; by hand: p.grad = None. An optimizer then skips parameters that got no "
    "gradient in a step, which momentum and weight decay would change otherwise, so --fix changes it with "
    "--unsafe-fixes only.",
    find=find,
    wrong=(
        STEP + "    opt.zero_grad(set_to_none=False)  # <-\n",
        STEP + "    net.zero_grad(set_to_none=False)  # <-\n",
        STEP + "    opt.zero_grad(False)  # <-\n",
        "for x in loader:\n    opt.zero_grad(\n        set_to_none=False,\n    )\n".replace("grad(\n", "grad(  # <-\n")
        + "    net(x).backward()\n    opt.step()\n",
        "def train(opt):\n    while True:\n        opt.zero_grad(set_to_none=False)  # <-\n        net(x).backward()\n"
        "        opt.step()\n",
        "for x in loader:\n    if i % 4 == 0:\n        opt.zero_grad(set_to_none=False)  # <-\n    net(x).backward()\n"
        "    opt.step()\n",
        STEP + "    for p in net.parameters():\n        p.grad.zero_()  # <-\n",
        STEP + "    for p in net.parameters():\n        if p.grad is not None:\n"
        "            p.grad.data.zero_()  # <-\n",
        STEP + "    for p in net.parameters():\n        p.grad.detach().zero_()  # <-\n",
    ),
    right=(
        STEP + "    opt.zero_grad()\n",
        STEP + "    opt.zero_grad(set_to_none=True)\n",
        STEP + "    opt.zero_grad(True)\n",
        STEP + "    opt.zero_grad(set_to_none=args.none)\n",
        STEP + "    opt.zero_grad(set_to_none=False)\nprint(net.weight.grad)\n",
        "opt.zero_grad(set_to_none=False)\n",
        "def reset(opt):\n    opt.zero_grad(set_to_none=False)\n",
        "for x in loader:\n    opt.zero_grad(set_to_none=False)\n    net(x)\n",
        STEP + "    opt.reset(set_to_none=False)\n",
        STEP + "    opt.zero_grad(**options)\n",
        STEP,
        STEP + "    for p in net.parameters():\n        p.grad = None\n",
        STEP + "    x.grad.zero_()\n",
        "for p in net.parameters():\n    p.grad.zero_()\n",
        STEP + "    for p in others:\n        p.grad.zero_()\n",
        "graph = torch.cuda.CUDAGraph()\n" + STEP + "    opt.zero_grad(set_to_none=False)\n",
        "net = torch.compile(net, mode='reduce-overhead')\n" + STEP + "    opt.zero_grad(set_to_none=False)\n",
    ),
)
