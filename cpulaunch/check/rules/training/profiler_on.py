"""Profilers and gradient checks that run whenever a program trains."""

import ast
from collections.abc import Iterator, Sequence

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, is_measuring, is_unconditional, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant

PROFILERS = (
    *("torch.profiler.profile", "torch.autograd.profiler.profile", "torch.autograd.profiler.emit_itt"),
    *("torch.profiler.profiler.profile", "torch.cuda.profiler.profile"),
)
CHECKS = ("torch.autograd.gradcheck", "torch.autograd.gradgradcheck")

FEW = 100
"""Steps that a program takes to be profiled."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Profilers without a schedule around or in training loops, and gradient checks in them, whatever the options."""
    loops = [loop for loop in training_loops(program) if not _is_short(program, loop)]
    for call in program.calls:
        name = program.called(call)
        if name in CHECKS:
            is_found = any(call in set(inside(program, loop)) for loop in loops)
        else:
            is_found = name in PROFILERS and _is_on(call) and _is_near(program, call, loops)
        if is_found and not is_in_test(program, call) and _always_runs(program, call):
            yield Hit(node=call, seen=f"{name.rpartition('.')[2]} is on in every training run")


def _is_short(program: ParsedProgram, loop: ast.AST) -> bool:
    """Whether a loop ends after some steps, as one that is written to be profiled."""
    turns = loop.iter if isinstance(loop, ast.For) else None
    is_counted = isinstance(turns, ast.Call) and isinstance(turns.func, ast.Name) and turns.func.id == "range"
    last = program.value(turns.args[-1]) if is_counted and isinstance(turns, ast.Call) and turns.args else None
    is_few = isinstance(last, ast.Constant) and isinstance(last.value, int) and last.value <= FEW
    return is_few or any(isinstance(node, ast.Break) for node in inside(program, loop))


def _always_runs(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call runs whatever the options, in a function whose purpose is not to measure."""
    return is_unconditional(program, call, program.function(call)) and not is_measuring(program, call)


def _is_on(call: ast.Call) -> bool:
    """Whether a profiler records all steps, as far as its arguments tell."""
    enabled = argument(call, "enabled", 0)
    is_switched = isinstance(enabled, ast.expr) and not is_constant(enabled, True)
    return argument(call, "schedule") is None and not (is_switched and not isinstance(enabled, ast.List))


def _is_near(program: ParsedProgram, call: ast.Call, loops: Sequence[ast.AST]) -> bool:
    """Whether the block of a `with` contains a training loop, or is in one."""
    item = program.parents[call]
    block = program.parents[item] if isinstance(item, ast.withitem) else None
    return block is not None and any(block in program.around(each) or each in program.around(block) for each in loops)


LOOP = "for x in loader:\n    net(x).backward()\n    opt.step()\n"
INNER = "".join(f"    {line}\n" for line in LOOP.splitlines())

RULE = Rule(
    id="profiler-on",
    summary="A profiler is left on in training",
    why="A profiler without a schedule records every operation of every step, with its shapes or stacks if asked, and "
    "keeps the events until the end: steps become slower and memory grows. gradcheck computes each gradient "
    "numerically.",
    fix="Remove it, make it an option, or give a schedule: torch.profiler.schedule(wait=1, warmup=1, active=3, "
    "repeat=1). `cpulaunch diagnose` profiles some steps of the unedited program.",
    find=find,
    wrong=(
        "with torch.profiler.profile() as prof:  # <-\n" + INNER,
        "with torch.autograd.profiler.profile(use_cuda=True):  # <-\n" + INNER,
        "from torch.profiler import profile\nwith profile(record_shapes=True, with_stack=True):  # <-\n" + INNER,
        "for x in loader:\n    with torch.profiler.profile():  # <-\n        net(x).backward()\n    opt.step()\n",
        "for x in loader:\n    torch.autograd.gradcheck(net, x)  # <-\n    net(x).backward()\n    opt.step()\n",
        "def train():\n    with torch.autograd.profiler.profile(True):  # <-\n"
        + "".join(f"    {line}\n" for line in INNER.splitlines()),
    ),
    right=(
        "with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)):\n" + INNER,
        "with torch.profiler.profile():\n    net(x)\n",
        "with torch.autograd.profiler.profile(enabled=args.profile):\n" + INNER,
        "def profile_training():\n    with torch.profiler.profile():\n"
        + "".join(f"    {line}\n" for line in INNER.splitlines()),
        "if args.profile:\n    with torch.profiler.profile():\n"
        + "".join(f"    {line}\n" for line in INNER.splitlines()),
        "with torch.profiler.record_function('train'):\n" + INNER,
        LOOP,
        "torch.autograd.gradcheck(net, x)\n",
        "with torch.profiler.profile():\n" + INNER.replace("x in loader", "x in range(20)"),
        "with torch.profiler.profile():\n" + INNER + "        if step == 10:\n            break\n",
        "def test_net():\n    with torch.profiler.profile():\n"
        + "".join(f"    {line}\n" for line in INNER.splitlines()),
        "from mine import profile\nwith profile():\n" + INNER,
        "with torch.autograd.profiler.profile(False):\n" + INNER,
        "prof = torch.profiler.profile()\n" + LOOP,
    ),
)
