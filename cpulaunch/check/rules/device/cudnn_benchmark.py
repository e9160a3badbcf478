"""cuDNN's benchmark mode for inputs of changing shapes."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import collate_function, loaders, pads_batches
from cpulaunch.check.source.flow import inside, is_in_test, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_of_self

SWITCH = "torch.backends.cudnn.benchmark"
CONVOLUTIONS = {f"torch.nn.{name}{size}" for name in ("Conv", "ConvTranspose") for size in ("1d", "2d", "3d")}
STACKING = (
    "torch.stack",
    "torch.cat",
    "torch.utils.data.default_collate",
    "torch.utils.data.dataloader.default_collate",
)
RESIZES = ("torch.nn.functional.interpolate", "torch.nn.functional.upsample")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """benchmark = True in a program whose batches are padded to their longest sample, or resized to random sizes."""
    switches = [node for node in program.nodes if isinstance(node, ast.Assign) and _switches_on(program, node)]
    if switches and (_pads(program) or _resizes(program)):
        for each in switches:
            if not is_in_test(program, each):
                yield Hit(node=each, seen="cuDNN searches for algorithms again for every new shape")


def _switches_on(program: ParsedProgram, node: ast.Assign) -> bool:
    return is_constant(node.value, True) and any(program.dotted(each) == SWITCH for each in node.targets)


def _pads(program: ParsedProgram) -> bool:
    """Whether convolutions of this program get batches of changing length: what is padded may be the labels only."""
    has_convolutions = any(program.called(call) in CONVOLUTIONS for call in program.calls)
    if not has_convolutions or program.imports_module("torchvision"):
        return False
    many = [call for call in loaders(program) if not is_constant(argument(call, "batch_size", 1), 1)]
    return any(pads_batches(program, call) and not _stacks(program, call) for call in many)


def _stacks(program: ParsedProgram, loader: ast.Call) -> bool:
    """Whether a loader's batches have tensors of one size beside the padded ones, which may be what is convolved."""
    function = collate_function(program, loader)
    return function is not None and any(program.called(node) in STACKING for node in inside(program, function))


def _resizes(program: ParsedProgram) -> bool:
    """Whether a training loop resizes its batches to a size that it draws."""
    for loop in training_loops(program):
        body = list(inside(program, loop))
        drawn = {
            target.id
            for node in body
            if isinstance(node, ast.Assign) and _draws(program, node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in body:
            if not isinstance(node, ast.Call) or program.called(node) not in RESIZES:
                continue
            size = argument(node, "size", 1) or argument(node, "scale_factor", 2)
            names = {each.id for each in ast.walk(size) if isinstance(each, ast.Name)} if size else set()
            if names & drawn or (size is not None and _draws(program, size)):
                return True
    return False


def _draws(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether an expression draws a random number; not one of self's."""
    return not is_of_self(node) and any(
        program.called(each).startswith(("random.", "numpy.random.")) for each in ast.walk(node)
    )


ON = "torch.backends.cudnn.benchmark = True"
NET = "from torch.nn.utils.rnn import pad_sequence\n\nnet = nn.Conv1d(80, 256, 3)\n"
PADDED = "loader = DataLoader(data, 32, collate_fn=lambda x: pad_sequence(x))\n"
LOOP = """import random
import numpy as np

for x in loader:
    size = {}
    x = F.interpolate(x, size=size)
    net(x).backward()
    opt.step()
"""
DRAWN = LOOP.format("random.choice([320, 480, 640])")

RULE = Rule(
    id="cudnn-benchmark",
    summary="cuDNN's benchmark mode is on for inputs of changing shapes",
    why="With benchmark = True cuDNN times all algorithms for each new shape of an input, and keeps the fastest. With "
    "shapes that change from batch to batch it searches in most steps, which costs more than it gains.",
    fix="Leave it off, or make the shapes few: buckets of lengths, a short list of sizes kept for many steps each.",
    find=find,
    is_default=False,
    wrong=(
        NET + ON + "  # <-\n" + PADDED,
        NET + "def main():\n    " + ON + "  # <-\n" + PADDED,
        "from torch.backends import cudnn\n\n" + NET + "cudnn.benchmark = True  # <-\n" + PADDED,
        ON + "  # <-\n" + DRAWN,
        ON + "  # <-\n" + LOOP.format("np.random.randint(10, 20) * 32"),
        ON + "  # <-\n" + LOOP.format("(1, 1)").replace("size=size", "scale_factor=random.uniform(0.5, 1.5)"),
    ),
    right=(
        ON + "\n" + LOOP.format("640"),
        ON.replace("True", "False") + "\n" + DRAWN,
        NET + ON.replace("True", "args.benchmark") + "\n" + PADDED,
        NET + ON + "\nloader = DataLoader(data, 32)\n",
        NET.replace("nn.Conv1d(80, 256, 3)", "nn.Linear(80, 256)") + ON + "\n" + PADDED,
        NET + ON + "\n" + PADDED.replace("32", "1"),
        NET + PADDED,
        NET
        + ON
        + "\ndef collate(batch):\n    return torch.stack(batch[0]), pad_sequence(batch[1])\n\n"
        + PADDED.replace("lambda x: pad_sequence(x)", "collate"),
        "import torchvision\n" + NET + ON + "\n" + PADDED,
        ON + "\nimport random\nx = F.interpolate(x, size=random.choice([1, 2]))\n",
        "def test_it():\n    " + ON + "\n\n" + DRAWN,
        "from mine import cudnn\ncudnn.benchmark = True\n" + DRAWN,
        ON + "\n" + DRAWN.replace("size=size", "size=(224, 224)"),
        "torch.backends.cudnn.deterministic = True\n" + DRAWN,
    ),
)
