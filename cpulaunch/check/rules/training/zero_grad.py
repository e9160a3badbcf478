"""Gradients that are filled with zeros instead of dropped."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.flow import training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, method


def find(program: ParsedProgram) -> Iterator[Hit]:
    """zero_grad(set_to_none=False) in a training loop of a program that does not read .grad."""
    if any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in program.nodes):
        return
    loops = training_loops(program)
    for call in program.calls():
        if method(call) != "zero_grad" or not is_constant(argument(call, "set_to_none", 0), False):
            continue
        if any(loop in program.around(call) for loop in loops):
            edit = CallEdit(remove=("set_to_none",)) if call.keywords else None
            yield Hit(node=call, seen="zero_grad(set_to_none=False) writes zeros to every gradient", edit=edit)


STEP = "for x in loader:\n    net(x).backward()\n    opt.step()\n"

RULE = Rule(
    id="zero-grad",
    summary="zero_grad writes zeros instead of dropping the gradients",
    why="With set_to_none=False each step writes zeros to every gradient, and backward then reads and adds to them. "
    "torch's default drops the gradients: backward writes them once. The rule is silent in programs that read .grad.",
    fix="Call zero_grad() without set_to_none.",
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
    ),
)
