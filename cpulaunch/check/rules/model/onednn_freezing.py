"""optimize_for_inference together with oneDNN Graph."""

from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.program import ParsedProgram, is_constant

ENABLE, OPTIMIZE = "torch.jit.enable_onednn_fusion", "torch.jit.optimize_for_inference"


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Calls of optimize_for_inference in a program that switches oneDNN Graph on."""
    calls = list(program.calls)
    if any(program.called(call) == ENABLE and call.args and is_constant(call.args[0], True) for call in calls):
        for call in calls:
            if program.called(call) == OPTIMIZE:
                yield Hit(node=call, seen="optimize_for_inference hides operations from oneDNN Graph")


ON = "torch.jit.enable_onednn_fusion(True)\n"
FAST = "torch.jit.optimize_for_inference"

RULE = Rule(
    id="onednn-freezing",
    summary="optimize_for_inference is used together with oneDNN Graph",
    why="oneDNN Graph fuses the operations of a traced and frozen module. optimize_for_inference replaces these "
    "operations by others first, so that there is nothing left to fuse. torch's tuning guide names trace and freeze.",
    fix="Use torch.jit.freeze(torch.jit.trace(net, example)), or `cpulaunch --graph onednn` on the unedited program.",
    find=find,
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
        ON + "net = torch.compile(net)\n",
        f"def torch_free(torch):\n    torch.jit.enable_onednn_fusion(True)\n    return {FAST}\n",
    ),
)
