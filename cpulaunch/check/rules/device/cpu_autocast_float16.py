"""Autocast to float16 on a CPU."""

from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant

GENERAL = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
OF_CPU = ("torch.cpu.amp.autocast",)


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Autocast whose device is the CPU and whose type is float16, both as constants."""
    for call in program.calls:
        name = program.called(call)
        is_cpu = name in OF_CPU or (name in GENERAL and is_constant(argument(call, "device_type", 0), "cpu"))
        kind = argument(call, "dtype", 0 if name in OF_CPU else 1) if is_cpu else None
        if program.dotted(kind) in ("torch.float16", "torch.half") and not is_in_test(program, call):
            yield Hit(node=call, seen="autocast to float16 on a CPU")


RULE = Rule(
    id="cpu-autocast-float16",
    summary="Autocast on a CPU uses float16 instead of bfloat16",
    why="Many more CPUs multiply in bfloat16 (AVX512_BF16, AMX, Arm's BF16) than in float16; elsewhere float16 goes "
    "through slow conversions. float16 also needs a gradient scaler in training.",
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
    ),
)
