"""Layers in low precision whose sizes are no multiples of 8."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, argument

LOW = re.compile(r"\b(autocast|bfloat16|float16|half|bf16|fp16|GradScaler)\b")
SIZES = {"torch.nn.Linear": ("in_features", "out_features"), "torch.nn.Conv2d": ("in_channels", "out_channels")}
SMALLEST = 100
"""Below it, a layer is too small to matter."""
MULTIPLE = 8


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Constant sizes of layers in a program that computes in low precision."""
    if not LOW.search(program.text) or not any(
        isinstance(node, ast.Name | ast.Attribute) and LOW.fullmatch(_word(node)) for node in program.nodes
    ):
        return
    for call in program.calls:
        names = SIZES.get(program.called(call), ())
        odd = [value for each in enumerate(names) if (value := _size(program, call, *each)) % MULTIPLE]
        if odd and not is_in_test(program, call):
            sizes = " and ".join(str(each) for each in odd)
            yield Hit(node=call, seen=f"{program.called(call).removeprefix('torch.')} of size {sizes}")


def _word(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _size(program: ParsedProgram, call: ast.Call, position: int, name: str) -> int:
    """A constant size that is large enough to matter, else 0."""
    value = program.value(argument(call, name, position))
    size = value.value if isinstance(value, ast.Constant) and isinstance(value.value, int) else 0
    return size if size >= SMALLEST else 0


CAST = "\nwith torch.autocast('cuda'):\n    net(x)\n"

RULE = Rule(
    id="odd-sizes",
    summary="A layer in low precision has a size that is no multiple of 8",
    why="Tensor cores and AMX multiply tiles. Sizes that are no multiples of 8 (better 64) in float16 and bfloat16 "
    "make the library pad, or choose slower kernels. A vocabulary of 50257 is the well-known example.",
    fix="Round the size up to a multiple of 8 or 64, as 50304 for 50257; unused outputs cost less than odd ones.",
    find=find,
    is_default=False,
    wrong=(
        "net = nn.Linear(768, 50257)  # <-" + CAST,
        "net = nn.Linear(300, 300)  # <-" + CAST,
        "VOCABULARY = 30522\nhead = nn.Linear(768, VOCABULARY, bias=False)  # <-" + CAST,
        "net = nn.Conv2d(in_channels=129, out_channels=256, kernel_size=3)  # <-" + CAST,
        "net = nn.Linear(1024, 4097).half()  # <-\n",
        "class Net(nn.Module):\n    def __init__(self):\n        self.a = nn.Linear(500, 512)  # <-\n" + CAST,
    ),
    right=(
        "net = nn.Linear(768, 50304)" + CAST,
        "net = nn.Linear(768, 50257)\n",
        "net = nn.Linear(768, 10)" + CAST,
        "net = nn.Linear(768, vocabulary)" + CAST,
        "net = nn.Conv2d(3, 64, 7)" + CAST,
        "net = nn.Embedding(50257, 768)" + CAST,
        "from mine import Linear\nnet = Linear(768, 50257)" + CAST,
        "net = nn.LSTM(300, 512)" + CAST,
        "def test_net():\n    nn.Linear(300, 300)\n" + CAST,
        "net = nn.Linear(*sizes)" + CAST,
        "size = 300\nsize = 304\nnet = nn.Linear(size, size)" + CAST,
    ),
)
