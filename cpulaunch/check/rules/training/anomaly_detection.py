"""Debugging of autograd that is always on."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test, is_measuring, is_unconditional, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant

SWITCH = "torch.autograd.set_detect_anomaly"
CONTEXTS = ("torch.autograd.detect_anomaly", "torch.autograd.profiler.emit_nvtx", "torch.autograd.set_detect_anomaly")
NVTX = "torch.autograd.profiler.emit_nvtx"
GRADIENT_CHECKS = ("torch.autograd.gradcheck", "torch.autograd.gradgradcheck")
OPTIONAL = re.compile(r"hook|callback|plugin|anomal|debug", re.IGNORECASE)
"""Names of classes that a program uses if it is told to."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Anomaly detection switched on whatever the options, and debug contexts around or in training steps."""
    loops, is_debugged = training_loops(program), _is_for_debugging(program)
    for call in program.calls:
        name = program.called(call)
        if name not in CONTEXTS or is_in_test(program, call) or is_measuring(program, call):
            continue
        if is_debugged or _is_optional(program, call) or (name == NVTX and _has_ranges(program)):
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


def _is_for_debugging(program: ParsedProgram) -> bool:
    """Whether a program switches anomaly detection off again, or checks gradients."""
    return any(
        program.called(call) in GRADIENT_CHECKS
        or (program.called(call) == SWITCH and is_constant(argument(call, "mode", 0), False))
        for call in program.calls
    )


def _is_optional(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call is in a class that is there to be added to a program: a hook, a callback."""
    around = [each for each in program.around(call) if isinstance(each, ast.ClassDef)]
    return any(OPTIONAL.search(ast.unparse(part)) for each in around for part in (ast.Name(each.name), *each.bases))


def _has_ranges(program: ParsedProgram) -> bool:
    """Whether a program annotates its own parts for a profiler, so that it was written to be profiled."""
    return program.imports_module("nvtx") or any("nvtx.range" in program.called(call) for call in program.calls)


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
        "class DetectAnomalyHook(Hook):\n    def before_run(self, runner):\n"
        "        torch.autograd.set_detect_anomaly(True)\n",
        "class Check(pl.Callback):\n    def on_train_start(self):\n        torch.autograd.set_detect_anomaly(True)\n",
        "torch.autograd.set_detect_anomaly(True)\nnet(x).backward()\ntorch.autograd.set_detect_anomaly(False)\n",
        "torch.autograd.gradcheck(f, x)\ntorch.autograd.set_detect_anomaly(True)\nf(x).backward()\n",
        "import nvtx\n\nwith torch.autograd.profiler.emit_nvtx():\n" + INNER,
        "torch.cuda.nvtx.range_push('all')\nwith torch.autograd.profiler.emit_nvtx():\n" + INNER,
    ),
)
