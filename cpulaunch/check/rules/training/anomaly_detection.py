"""Debugging of autograd that is always on."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test, is_measuring, is_unconditional, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant

SWITCH = "torch.autograd.set_detect_anomaly"
CONTEXTS = ("torch.autograd.detect_anomaly", "torch.autograd.profiler.emit_nvtx", "torch.autograd.set_detect_anomaly")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Anomaly detection switched on whatever the options, and debug contexts around or in training steps."""
    loops = training_loops(program)
    for call in program.calls:
        name = program.called(call)
        if name not in CONTEXTS or is_in_test(program, call) or is_measuring(program, call):
            continue
        if name == SWITCH and not is_constant(argument(call, "mode", 0), True):
            continue
        block = program.parents[program.parents[call]] if isinstance(program.parents[call], ast.withitem) else None
        near = block is not None and any(
            block in program.around(loop) or loop in program.around(block) for loop in loops
        )
        is_switch = name == SWITCH and isinstance(program.parents[call], ast.Expr)
        if (near or is_switch) and is_unconditional(program, call, program.function(call)):
            yield Hit(node=call, seen=f"{name.rpartition('.')[2]} is on in every run")


LOOP = "for x in loader:\n    net(x).backward()\n    opt.step()\n"
INNER = "".join(f"    {line}\n" for line in LOOP.splitlines())

RULE = Rule(
    id="anomaly-detection",
    summary="Debugging of autograd is left on",
    why="Anomaly detection records a stack trace for every operation of the forward and looks for NaN in every "
    "gradient; emit_nvtx annotates each operation. torch's tuning guide says to use them for debugging only.",
    fix="Remove it, or make it an option of the program; `cpulaunch --no-debug-apis` switches it off from outside.",
    find=find,
    wrong=(
        "torch.autograd.set_detect_anomaly(True)  # <-\n",
        "def main():\n    torch.autograd.set_detect_anomaly(mode=True)  # <-\n",
        "with torch.autograd.detect_anomaly():  # <-\n" + INNER,
        "for x in loader:\n    with torch.autograd.detect_anomaly():  # <-\n        net(x).backward()\n"
        "    opt.step()\n",
        "with torch.autograd.profiler.emit_nvtx():  # <-\n" + INNER,
        "from torch import autograd\nautograd.set_detect_anomaly(True, check_nan=False)  # <-\n",
    ),
    right=(
        "torch.autograd.set_detect_anomaly(False)\n",
        "torch.autograd.set_detect_anomaly(args.debug)\n",
        "if args.debug:\n    torch.autograd.set_detect_anomaly(True)\n",
        "with torch.autograd.detect_anomaly():\n    net(x).backward()\n",
        "with torch.autograd.set_detect_anomaly(False):\n" + INNER,
        "def test_gradients():\n    torch.autograd.set_detect_anomaly(True)\n",
        "from mine import set_detect_anomaly\nset_detect_anomaly(True)\n",
        "with torch.autograd.profiler.record_function('step'):\n" + INNER,
        LOOP,
        "if debug:\n    with torch.autograd.detect_anomaly():\n        train()\n",
        "print(torch.is_anomaly_enabled())\n",
        "def enable_debugging():\n    torch.autograd.set_detect_anomaly(True)\n",
    ),
)
