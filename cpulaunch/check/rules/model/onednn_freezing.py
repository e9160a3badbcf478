"""optimize_for_inference together with oneDNN Graph."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import CONDITIONS
from cpulaunch.check.source.program import ParsedProgram, is_constant

ENABLE, OPTIMIZE = "torch.jit.enable_onednn_fusion", "torch.jit.optimize_for_inference"


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Calls of optimize_for_inference in a program that switches oneDNN Graph on whenever these run."""
    calls = list(program.calls)
    switches = [
        call for call in calls if program.called(call) == ENABLE and call.args and is_constant(call.args[0], True)
    ]
    for call in calls:
        if program.called(call) == OPTIMIZE and any(_runs_before(program, each, call) for each in switches):
            yield Hit(node=call, seen="optimize_for_inference hides operations from oneDNN Graph")


def _runs_before(program: ParsedProgram, switch: ast.Call, call: ast.Call) -> bool:
    """Whether the switch is on whenever the call runs: all of its conditions are conditions of the call too."""
    known = [*program.around(call)]
    return all(each in known for each in program.around(switch) if isinstance(each, CONDITIONS))


ON = "torch.jit.enable_onednn_fusion(True)\n"
FAST = "torch.jit.optimize_for_inference"

RULE = Rule(
    id="onednn-freezing",
    summary="optimize_for_inference is used together with oneDNN Graph",
    why="oneDNN Graph fuses the operations of a traced and frozen module. optimize_for_inference replaces these "
    "operations by others first, so that there is nothing left to fuse. torch's tuning guide names trace and freeze.",
    fix="Use torch.jit.freeze(torch.jit.trace(net, example)), or `cpulaunch --graph onednn` on the unedited program.",
    find=find,
    is_default=False,
    wrong=(
        ON + f"net = {FAST}(torch.jit.script(net))  # <-\n",
        ON + f"net = {FAST}(torch.jit.freeze(torch.jit.trace(net, x)))  # <-\n",
        f"def load(net):\n    return {FAST}(net)  # <-\n\n" + ON,
        "from torch import jit\njit.enable_onednn_fusion(True)\nnet = jit.optimize_for_inference(net)  # <-\n",
        f"if fast:\n    torch.jit.enable_onednn_fusion(True)\n    net = {FAST}(net)  # <-\n",
    ),
    right=(
        f"net = {FAST}(net)\n",
        ON + "net = torch.jit.freeze(torch.jit.trace(net, x))\n",
        ON.replace("True", "False") + f"net = {FAST}(net)\n",
        ON.replace("True", "enabled") + f"net = {FAST}(net)\n",
        ON,
        ON + "from mine import optimize_for_inference\nnet = optimize_for_inference(net)\n",
        "from mine import enable_onednn_fusion\nenable_onednn_fusion(True)\n" + f"net = {FAST}(net)\n",
        ON + f"optimize = {FAST}\n",
        f"if args.fuse:\n    torch.jit.enable_onednn_fusion(True)\nif args.optimize:\n    net = {FAST}(net)\n",
        f"def fuse():\n    if fast:\n        torch.jit.enable_onednn_fusion(True)\n\nnet = {FAST}(net)\n",
        ON + "net = torch.compile(net)\n",
        f"def torch_free(torch):\n    torch.jit.enable_onednn_fusion(True)\n    return {FAST}\n",
    ),
)
