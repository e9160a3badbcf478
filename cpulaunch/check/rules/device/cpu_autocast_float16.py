"""Autocast to float16 on a CPU."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, is_measuring
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant

GENERAL = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
OF_CPU = ("torch.cpu.amp.autocast",)
CHOSEN = re.compile(
    r"bfloat16|bf16|onnx|torch\.export|coreml|executorch|openvino|\bmps\b|FlopCounter|GradScaler\(\s*(device=)?[\"']cpu",
    re.IGNORECASE,
)
"""Words of programs that have bfloat16 too, need float16 for an export or for Apple's GPUs, or scale its gradients."""
CHECKS = re.compile(r"check|verif|valid|compar|demo", re.IGNORECASE)
"""Names of functions that try float16 out."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Autocast whose device is the CPU and whose type is float16, both as constants, where nothing needs float16."""
    if CHOSEN.search(program.text):
        return
    for call in program.calls:
        name = program.called(call)
        is_cpu = name in OF_CPU or (name in GENERAL and is_constant(argument(call, "device_type", 0), "cpu"))
        kind = argument(call, "dtype", 0 if name in OF_CPU else 1) if is_cpu else None
        if program.dotted(kind) not in ("torch.float16", "torch.half") or is_in_test(program, call):
            continue
        if not (is_constant(argument(call, "enabled"), False) or _is_check(program, call)):
            yield Hit(node=call, seen="autocast to float16 on a CPU")


def _is_check(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call is in a function that measures, or checks what it computes."""
    function = program.function(call)
    is_named = isinstance(function, ast.FunctionDef) and CHECKS.search(function.name) is not None
    return is_named or _asserts(program, function) or is_measuring(program, call)


@lru_cache(maxsize=64)
def _asserts(program: ParsedProgram, function: ast.AST) -> bool:
    return any(isinstance(node, ast.Assert) for node in inside(program, function))


RULE = Rule(
    id="cpu-autocast-float16",
    summary="Autocast on a CPU uses float16 instead of bfloat16",
    why="Many more CPUs multiply in bfloat16 (AVX512_BF16, AMX, Arm's BF16) than in float16; elsewhere float16 goes "
    "through slow conversions. float16 also needs a gradient scaler in training. The rule is silent in programs that "
    "know bfloat16, export a model, use Apple's GPUs or scale gradients on the CPU, and in functions that check "
    "something.",
    fix="Use dtype=torch.bfloat16, the CPU's default, or `cpulaunch --precision bf16` on the unedited program.",
    find=find,
    wrong=(
        "with torch.autocast('cpu', dtype=torch.float16):  # <-\n    net(x)\n",
        "with torch.autocast(device_type='cpu', dtype=torch.half):  # <-\n    net(x)\n",
        "with torch.amp.autocast('cpu', torch.float16):  # <-\n    net(x)\n",
        "with torch.cpu.amp.autocast(dtype=torch.float16):  # <-\n    net(x)\n",
        "from torch import autocast\ncast = autocast('cpu', dtype=torch.float16, enabled=fast)  # <-\n",
    ),
    right=(
        "with torch.autocast('cpu'):\n    net(x)\n",
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    net(x)\n",
        "with torch.autocast('cuda', dtype=torch.float16):\n    net(x)\n",
        "with torch.autocast(device, dtype=torch.float16):\n    net(x)\n",
        "with torch.autocast('cpu', dtype=dtype):\n    net(x)\n",
        "with torch.cpu.amp.autocast():\n    net(x)\n",
        "with torch.cuda.amp.autocast(dtype=torch.float16):\n    net(x)\n",
        "from mine import autocast\nwith autocast('cpu', dtype=torch.float16):\n    net(x)\n",
        "def test_cast():\n    torch.autocast('cpu', dtype=torch.float16)\n",
        "x = x.to('cpu', torch.float16)\n",
        "torch.autocast('cpu', **options)\n",
        "if args.bf16:\n    net.to(torch.bfloat16)\nwith torch.autocast('cpu', dtype=torch.float16):\n    net(x)\n",
        "with torch.autocast('cpu', dtype=torch.float16):\n    torch.onnx.export(net, x, 'net.onnx')\n",
        "if device == 'mps':\n    with torch.autocast('cpu', dtype=torch.float16):\n        net(x)\n",
        "scaler = torch.amp.GradScaler('cpu')\nwith torch.autocast('cpu', dtype=torch.float16):\n    net(x)\n",
        "with torch.autocast('cpu', dtype=torch.float16, enabled=False):\n    net(x)\n",
        "with torch.autocast('cpu', dtype=torch.float16):\n    assert net(x).isfinite().all()\n",
        "def verify(net):\n    with torch.autocast('cpu', dtype=torch.float16):\n        return net(x)\n",
    ),
)
