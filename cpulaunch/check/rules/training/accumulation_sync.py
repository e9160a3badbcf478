"""Gradient accumulation whose every backward reduces the gradients between ranks."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_unconditional, training_loops
from cpulaunch.check.source.program import ParsedProgram, method

NAMES = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
SWITCHES = {"no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "accumulate"}


def find(program: ParsedProgram) -> Iterator[Hit]:
    """backward in loops that step every n turns, in a program with DistributedDataParallel and without no_sync."""
    if not any(program.called(call) in NAMES for call in program.calls):
        return
    if any(isinstance(node, ast.Attribute) and node.attr in SWITCHES for node in program.nodes):
        return
    for loop in training_loops(program):
        steps = [node for node in inside(program, loop) if method(node) == "step" and _is_optimizers(node)]
        if steps and all(_is_every_nth(program, step, loop) for step in steps):
            for node in inside(program, loop):
                if isinstance(node, ast.Call) and method(node) == "backward" and is_unconditional(program, node, loop):
                    yield Hit(node=node, seen="every backward reduces the gradients, but only some turns step")


def _is_optimizers(call: ast.AST) -> bool:
    name = ast.unparse(call.func).lower() if isinstance(call, ast.Call) else ""
    return "opt" in name or "scaler" in name


def _is_every_nth(program: ParsedProgram, step: ast.AST, loop: ast.AST) -> bool:
    for each in program.around(step):
        if each is loop:
            return False
        steps_in_both = isinstance(each, ast.If) and _steps(each.body) and _steps(each.orelse)
        if isinstance(each, ast.If) and not steps_in_both and _has_remainder(program, each.test):
            return True
    return False


def _steps(block: list[ast.stmt]) -> bool:
    """Whether a branch has an optimizer's step."""
    return any(method(node) == "step" and _is_optimizers(node) for each in block for node in ast.walk(each))


def _has_remainder(program: ParsedProgram, test: ast.expr) -> bool:
    """Whether a condition, or the value of a name in it, is about a remainder."""
    parts = [test, *inside(program, test)]
    values = [program.value(each) for each in parts if isinstance(each, ast.Name)]
    parts += [
        node
        for each in values
        if isinstance(each, ast.expr) and not isinstance(each, ast.Lambda)
        for node in (each, *inside(program, each))
    ]
    return any(_is_remainder(node) for node in parts)


def _is_remainder(node: ast.AST) -> bool:
    """Whether a node is `a % b` of numbers: that of a text formats it."""
    is_text = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not is_text


DDP = "net = nn.parallel.DistributedDataParallel(base)\n"
LOOP = """for i, x in enumerate(loader):
    (net(x) / 4).backward(){}
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
"""
FOUND, PLAIN = LOOP.format("  # <-"), LOOP.format("")

RULE = Rule(
    id="accumulation-sync",
    summary="Gradient accumulation without no_sync",
    why="DistributedDataParallel reduces the gradients between all ranks in every backward. When several backwards "
    "accumulate for one optimizer step, all but the last of these reductions are wasted.",
    fix="Run forward and backward of the turns without a step under `with net.no_sync():`.",
    find=find,
    wrong=(
        DDP + FOUND,
        DDP + FOUND.replace("(i + 1) % 4 == 0", "i % steps == steps - 1"),
        DDP + FOUND.replace("opt.step", "scaler.step"),
        DDP + FOUND.replace("(i + 1) % 4 == 0", "i % 4 == 3 or i == last"),
        DDP + FOUND.replace("    if (i + 1) % 4 == 0:", "    is_last = (i + 1) % 4 == 0\n    if is_last:"),
        "from torch.nn.parallel import DistributedDataParallel as DDP\nnet = DDP(base)\n" + FOUND,
        DDP
        + FOUND.replace(
            "        opt.step()", "        if i % 2:\n            opt.step()\n        else:\n            opt2.step()"
        ),
        "def main(optimizer):\n    net = nn.parallel.DistributedDataParallel(base)\n    for i, x in enumerate(data):\n"
        "        net(x).backward()  # <-\n        if i % 2:\n            optimizer.step()\n",
    ),
    right=(
        PLAIN,
        DDP + PLAIN.replace("    (net", "    with net.no_sync():\n        pass\n    (net"),
        DDP + "for x in loader:\n    net(x).backward()\n    opt.step()\n",
        DDP + "for i, x in enumerate(loader):\n    net(x).backward()\n    opt.step()\n    if i % 4 == 0:\n"
        "        print(i)\n",
        DDP + PLAIN.replace("(i + 1) % 4 == 0", "ready"),
        "def has_room(at):\n    return ring[at % 9] is None\n\n"
        + DDP
        + PLAIN.replace("(i + 1) % 4 == 0", "has_room(i)"),
        "has_room = lambda at: ring[at % 9] is None\n" + DDP + PLAIN.replace("(i + 1) % 4 == 0", "has_room(i)"),
        DDP + PLAIN.replace("(i + 1) % 4 == 0", "any(map(lambda at: at % 9, ring))"),
        DDP + PLAIN.replace("(i + 1) % 4 == 0", "'turn %d' % i in wanted"),
        DDP + PLAIN.replace("    (net", "    net.require_backward_grad_sync = i % 4 == 3\n    (net"),
        DDP + PLAIN + "    else:\n        other_opt.step()\n",
        "net = nn.DataParallel(base)\n" + PLAIN,
        "from mine import DistributedDataParallel\nnet = DistributedDataParallel(base)\n" + PLAIN,
        DDP + "for i, x in enumerate(loader):\n    net(x).backward()\n    if i % 4 == 0:\n        schedule.step()\n",
        DDP + "for i, x in enumerate(loader):\n    net(x)\n    if i % 4 == 0:\n        opt.step()\n",
        DDP
        + PLAIN.replace(
            "enumerate(loader):", "enumerate(loader):\n    with accelerator.accumulate(net):\n        pass"
        ),
    ),
)
