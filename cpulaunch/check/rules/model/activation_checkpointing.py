"""A deep network that runs out of memory in training although it keeps all activations."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, is_measuring, training_loops
from cpulaunch.check.source.models import called_modules, class_of, layers, library_model
from cpulaunch.check.source.program import ParsedProgram

SAVING = re.compile(
    r"utils\.checkpoint|checkpoint_sequential|checkpoint_wrapper|(gradient|grad|activation|use)_checkpoint|offload"
    r"|deepspeed|save_on_cpu|saved_tensors_hooks|Reversible",
    re.IGNORECASE,
)
"""Words of programs that recompute or move activations, or leave that to a library."""
ERRORS = ("torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError", "torch.cuda.memory.OutOfMemoryError")
MESSAGE = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)
SEQUENCES = ("torch.nn.Sequential", "torch.nn.ModuleList")
STACKS = ("torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder", "torch.nn.Transformer")
DEEP = 12
"""Layers from which on a network is deep, so that activations between its blocks are a small part of all."""
REPEATED = 6
"""So are blocks that are made in a comprehension, so many times."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Deep networks of a training loop that catches errors of memory, in a program that recomputes nothing."""
    if SAVING.search(program.text):
        return
    for loop in training_loops(program):
        handlers = [node for node in inside(program, loop) if isinstance(node, ast.ExceptHandler)]
        if not any(_is_of_memory(program, each) for each in handlers) or is_measuring(program, loop):
            continue
        for made in called_modules(program, loop):
            if _is_deep(program, made) and not is_in_test(program, made):
                yield Hit(node=made, seen="training runs out of memory, and all activations of a deep network are kept")


def _is_of_memory(program: ParsedProgram, handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for a step that found no memory, and does not look for the largest batch that does."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    texts = (node.value for node in ast.walk(handler) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    is_named = any(program.dotted(each) in ERRORS for each in kinds)
    stored = (node for node in ast.walk(handler) if isinstance(node, ast.Name | ast.Attribute))
    names = (node.id if isinstance(node, ast.Name) else node.attr for node in stored if isinstance(node.ctx, ast.Store))
    return (is_named or any(map(MESSAGE.search, texts))) and not any("batch" in name.lower() for name in names)


def _is_deep(program: ParsedProgram, made: ast.Call) -> bool:
    """Whether a call makes a network of many layers: one of a library, or a class of this file."""
    if library_model(program, made):
        return True
    owner = class_of(program, made)
    if owner is None:
        return False
    found = list(layers(program, owner))
    return len(found) >= DEEP or any(
        program.called(each) in STACKS
        or (program.called(each) in SEQUENCES and any(_repeats(program, part) for part in each.args))
        for each in found
    )


def _repeats(program: ParsedProgram, part: ast.expr) -> bool:
    """Whether an argument makes many blocks in a comprehension."""
    made = part.value if isinstance(part, ast.Starred) else part
    if not isinstance(made, ast.ListComp | ast.GeneratorExp):
        return False
    turns = made.generators[0].iter
    count = program.value(turns.args[-1]) if isinstance(turns, ast.Call) and turns.args else None
    return not (isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value < REPEATED)


def _train(made: str, caught: str = "RuntimeError as error", told: str = "'out of memory' in str(error)") -> str:
    return (
        f"import torchvision\nimport transformers\n\n{made}\nfor x, y in loader:\n    try:\n"
        f"        loss_of(net(x), y).backward()\n        opt.step()\n    except {caught}:\n"
        f"        if not ({told}):\n            raise\n        opt.zero_grad()\n"
    )


NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = {}

"""
BLOCKS = NET.format("nn.Sequential(*[Block() for _ in range(12)])")
FEW = NET.format("nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))")
RESNET = "net = torchvision.models.resnet101()"

RULE = Rule(
    id="activation-checkpointing",
    summary="A deep network runs out of memory in training, and keeps all activations",
    why="Backward needs the activations of all layers, so forward keeps them: in a deep network most of the memory. "
    "Checkpoints keep only those between blocks and compute the others again in backward, for about a third more "
    "time; batches that failed then fit. The rule speaks only where a training loop catches errors of memory, which "
    "says that it runs near the limit, and is silent in programs that checkpoint, offload or use DeepSpeed.",
    fix="Run the blocks under torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or "
    "checkpoint_sequential; in transformers call net.gradient_checkpointing_enable().",
    find=find,
    is_default=False,
    wrong=(
        _train(RESNET + "  # <-"),
        _train("net = transformers.BertModel.from_pretrained('bert-large-cased').cuda()  # <-"),
        _train(RESNET + "  # <-", caught="torch.cuda.OutOfMemoryError", told="True"),
        _train(RESNET + "  # <-", caught="(torch.OutOfMemoryError, RuntimeError)", told="True"),
        BLOCKS + _train("net = Net()  # <-"),
        BLOCKS.replace("Sequential(*[", "ModuleList([") + _train("net = torch.compile(Net().cuda())  # <-"),
        NET.format("nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 12)") + _train("net = Net()  # <-"),
        _train(RESNET + "  # <-\nif torch.cuda.device_count() > 1:\n    net = nn.DataParallel(net)\nnet = net.cuda()"),
        _train("net = transformers.GPT2LMHeadModel(configuration)  # <-").replace("net(x)", "net.forward(x)"),
    ),
    right=(
        _train(RESNET, told="'nan' in str(error)"),
        _train(RESNET, caught="ValueError as error", told="True"),
        FEW + _train("net = Net()"),
        BLOCKS.replace("12", "2") + _train("net = Net()"),
        _train("net = build()"),
        _train(RESNET + "\nif small:\n    net = torchvision.models.alexnet()"),
        _train("net = transformers.AutoTokenizer.from_pretrained('bert-large-cased')"),
        "from torch.utils.checkpoint import checkpoint\n" + _train(RESNET),
        _train(RESNET + "\nnet.gradient_checkpointing_enable()"),
        _train(RESNET).replace("opt.step()", "pass"),
        _train(RESNET).replace("        opt.zero_grad()", "        batch_size //= 2"),
        f"import torchvision\n{RESNET}\nfor x, y in loader:\n    loss_of(net(x), y).backward()\n    opt.step()\n",
        "def benchmark(loader):\n    " + _train(RESNET).replace("\n", "\n    "),
        "import deepspeed\n" + _train(RESNET),
        _train("from mine import torchvision\n" + RESNET),
    ),
)
