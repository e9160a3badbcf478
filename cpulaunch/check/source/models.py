"""Modules that a program makes: which class or library function made them, and what they consist of."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram, argument, method, receiver

MOVES = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_"}
WRAPPERS = (
    *("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.DistributedDataParallel"),
    *("torch.nn.parallel.distributed.DistributedDataParallel", "torch.compile"),
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
)
CONVOLUTIONAL = (
    *("alexnet", "vgg", "resnet", "resnext", "wide_resnet", "densenet", "inception", "googlenet", "shufflenet"),
    *("mobilenet", "mnasnet", "efficientnet", "regnet", "convnext", "squeezenet", "fcn_", "deeplab", "lraspp", "unet"),
)
"""How torchvision and timm begin the names of convolutional networks."""
OTHERS = (
    *("vit_", "swin_", "maxvit", "fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "ssd", "fcos", "raft"),
    *("r3d_", "mc3_", "r2plus1d", "s3d", "mvit", "visiontransformer", "swintransformer"),
)
"""How torchvision begins the names of its other networks; its transforms, weights and tools have other names."""
CREATE = ("timm.create_model", "timm.models.create_model", "torchvision.models.get_model")
MODEL = re.compile(r"transformers\.(?!DataCollator)(\w*Model|\w+For[A-Z]\w+)(\.from_pretrained|\.from_config)?")
"""How transformers names its networks, and what makes them; tokenizers and processors have other names."""
CONV2D = ("torch.nn.Conv2d", "torch.nn.ConvTranspose2d")
LINEAR = ("torch.nn.Linear",)
ATTENTION = {
    "torch.nn.Transformer": "d_model",
    "torch.nn.TransformerEncoderLayer": "d_model",
    "torch.nn.TransformerDecoderLayer": "d_model",
    "torch.nn.MultiheadAttention": "embed_dim",
}
"""Layers with attention -> the argument that says how long their vectors are."""
WIDE_ATTENTION = 256
"""Shorter vectors leave most of a step to starting operations, whatever the precision."""
MAX_DEPTH = 4


def made_by(program: ParsedProgram, node: ast.AST | None) -> ast.Call | None:
    """The call that made a module, without moves between devices, wrappers for several ranks and compilation."""
    for _ in range(8):
        value = program.value(node)
        value = _first(program, value) if isinstance(value, ast.Name) else value
        if not isinstance(value, ast.Call):
            return None
        inner = _wrapped(program, value)
        if inner is None:
            return value
        node = inner
    return None


def _wrapped(program: ParsedProgram, value: ast.AST) -> ast.expr | None:
    """The module that a call moves or wraps."""
    if method(value) in MOVES and not program.called(value):
        return receiver(value)
    return argument(value, "module", 0) if program.called(value) in WRAPPERS and isinstance(value, ast.Call) else None


def _first(program: ParsedProgram, name: ast.Name) -> ast.AST:
    """What a name is first assigned from, if all other assignments move or wrap what it had before."""
    found = [each for each in program.values(name) if not _renews(program, each, name)]
    return found[0] if len(found) == 1 else name


def _renews(program: ParsedProgram, value: ast.AST, name: ast.Name) -> bool:
    inner = _wrapped(program, value)
    while inner is not None and not isinstance(inner, ast.Name):
        inner = _wrapped(program, inner)
    return inner is not None and program.same(inner, name)


def called_modules(program: ParsedProgram, loop: ast.AST) -> Iterator[ast.Call]:
    """The calls that made the modules which a loop calls."""
    for node in inside(program, loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            made = made_by(program, receiver(node) if method(node) == "forward" else node.func)
            if made is not None and (library_model(program, made) or isinstance(class_of(program, made), ast.ClassDef)):
                yield made


def class_of(program: ParsedProgram, made: ast.Call) -> ast.ClassDef | None:
    """The class of this file that a call makes an object of."""
    value = program.value(made.func)
    return value if isinstance(value, ast.ClassDef) else None


def library_model(program: ParsedProgram, made: ast.Call) -> str:
    """The name of a model that torchvision, timm or transformers makes, "" if it is none of theirs."""
    name = program.called(made)
    first = made.args[0] if made.args else None
    if name in CREATE:
        return str(first.value).lower() if isinstance(first, ast.Constant) else ""
    if name.startswith("torchvision.models."):
        last = name.rpartition(".")[2].lower()
        return last if last.startswith((*CONVOLUTIONAL, *OTHERS)) else ""
    found = MODEL.fullmatch(name)
    return found[1].lower() if found else ""


def layers(program: ParsedProgram, owner: ast.ClassDef, depth: int = MAX_DEPTH) -> Iterator[ast.Call]:
    """Calls of torch's layers in a class, and in the classes of this file that it uses."""
    for node in ast.walk(owner):
        if not isinstance(node, ast.Call):
            continue
        if program.called(node).startswith("torch.nn."):
            yield node
        used = class_of(program, node)
        if used is not None and used is not owner and depth:
            yield from layers(program, used, depth - 1)


def is_convolutional(program: ParsedProgram, made: ast.Call) -> bool:
    """Whether a call makes a network of many wide two-dimensional convolutions."""
    if library_model(program, made).startswith(CONVOLUTIONAL):
        return True
    owner = class_of(program, made)
    if owner is None:
        return False
    inner = [node for node in ast.walk(owner) if isinstance(node, ast.Call)]
    if any(library_model(program, each).startswith(CONVOLUTIONAL) for each in inner):
        return True
    return sum(_is_wide(program, each, CONV2D, 64) for each in layers(program, owner)) >= 4


def is_large(program: ParsedProgram, made: ast.Call) -> bool:
    """Whether a call makes a network whose matrix products and convolutions dominate."""
    if library_model(program, made) or is_convolutional(program, made):
        return True
    owner = class_of(program, made)
    return owner is not None and any(
        _is_wide_attention(program, each) or _is_wide(program, each, LINEAR, 2048) for each in layers(program, owner)
    )


def _is_wide_attention(program: ParsedProgram, layer: ast.Call) -> bool:
    """Whether a layer has attention over vectors that are long, and whose length is in the source."""
    name = ATTENTION.get(program.called(layer))
    width = program.value(argument(layer, name, 0)) if name else None
    return isinstance(width, ast.Constant) and isinstance(width.value, int) and width.value >= WIDE_ATTENTION


def _is_wide(program: ParsedProgram, layer: ast.Call, names: tuple[str, ...], smallest: int) -> bool:
    """Whether a layer of a kind has constant inputs and outputs of at least a size."""
    if program.called(layer) not in names:
        return False
    kind = "features" if names == LINEAR else "channels"
    sizes = [program.value(argument(layer, f"{end}_{kind}", place)) for place, end in enumerate(("in", "out"))]
    return all(
        isinstance(each, ast.Constant) and isinstance(each.value, int) and each.value >= smallest for each in sizes
    )
