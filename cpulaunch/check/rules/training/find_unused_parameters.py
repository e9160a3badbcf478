"""find_unused_parameters=True for a module that uses all of its parameters."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.datasets import methods
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.models import class_of, library_model, made_by
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_of_self

NAMES = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp, ast.comprehension, ast.With)
MODULE = "torch.nn.Module"
STACKS = {"torch.nn.TransformerEncoder": "encoder_layer", "torch.nn.TransformerDecoder": "decoder_layer"}
"""Layers that consist of copies of an argument."""
CLASSIFIERS = (
    *("alexnet", "vgg", "resnet", "resnext", "wide_resnet", "densenet", "squeezenet", "mobilenet", "mnasnet"),
    *("shufflenet", "efficientnet", "regnet", "convnext", "vit_", "swin_"),
)
"""How torchvision begins the names of networks that use all of their parameters in every step."""
WITHOUT_PARAMETERS = (
    *("ReLU", "GELU", "SiLU", "ELU", "SELU", "LeakyReLU", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Hardswish"),
    *("Dropout", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Flatten", "Identity", "Upsample"),
    *("CrossEntropyLoss", "MSELoss", "BCE", "NLLLoss", "L1Loss", "ZeroPad", "ReflectionPad", "ReplicationPad"),
)
"""How the names of layers begin that have nothing to train."""
CUTTING = {
    *("detach", "data", "no_grad", "inference_mode", "argmax", "argmin", "argsort", "round", "sign", "requires_grad_"),
    *("long", "int", "short", "bool", "byte", "to", "type", "item", "tolist", "numpy", "max", "min", "topk", "sort"),
    *("multinomial", "bernoulli", "gt", "lt", "ge", "le", "eq", "ne", "one_hot", "bincount", "nonzero", "unique"),
}
"""Names of attributes that may keep gradients from what is before them."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DistributedDataParallel with the flag around a class of this file whose forward uses all that it has."""
    for call in program.calls:
        if program.called(call) not in NAMES or not is_constant(argument(call, "find_unused_parameters"), True):
            continue
        if not is_in_test(program, call) and _is_used_wholly(program, argument(call, "module", 0)):
            edit = CallEdit(remove=("find_unused_parameters",))
            yield Hit(node=call, seen="forward uses every submodule, yet find_unused_parameters=True", edit=edit)


def _is_used_wholly(program: ParsedProgram, module: ast.expr | None) -> bool:
    """Whether a module is a classifier of torchvision, or of a class of this file whose forward uses all it has."""
    made = made_by(program, module)
    if made is None:
        return False
    if program.called(made).startswith("torchvision.models."):
        return library_model(program, made).startswith(CLASSIFIERS)
    owner = class_of(program, made)
    return owner is not None and _uses_all(program, owner)


def _uses_all(program: ParsedProgram, owner: ast.ClassDef) -> bool:
    by_name = methods(owner)
    if not {"__init__", "forward"} <= set(by_name) or [program.dotted(each) for each in owner.bases] != [MODULE]:
        return False
    forward = by_name["forward"]
    if any(isinstance(each, BRANCHES) for each in ast.walk(forward)):
        return False
    stored = [node for node in ast.walk(owner) if is_of_self(node) and _is_stored(node)]
    if any(program.function(node) is not by_name["__init__"] for node in stored):
        return False
    values = {node.attr: program.assigned(node) for node in stored if isinstance(node, ast.Attribute)}
    layers = {name: value for name, value in values.items() if not _is_plain(program, value)}
    if len(stored) > len(values) or not all(_is_known(program, value) for value in layers.values()):
        return False
    trained = {name for name, value in layers.items() if not _is_without_parameters(program, value)}
    return bool(trained) and trained <= _in_result(forward)


def _is_plain(program: ParsedProgram, value: ast.AST | None) -> bool:
    """Whether a value is a number or a text: a constant, or a parameter whose default is one."""
    if not isinstance(value, ast.Name):
        return isinstance(value, ast.Constant)
    function = program.function(value)
    if not isinstance(function, ast.FunctionDef):
        return False
    given = function.args
    named = [*given.posonlyargs, *given.args]
    defaults = [
        *zip(reversed(named), reversed(given.defaults), strict=False),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    return any(
        each.arg == value.id and isinstance(default, ast.Constant) and default.value is not None
        for each, default in defaults
    )


def _is_without_parameters(program: ParsedProgram, value: ast.AST | None) -> bool:
    return program.called(value).rpartition(".")[2].startswith(WITHOUT_PARAMETERS)


def _is_known(program: ParsedProgram, value: ast.AST | None) -> bool:
    """Whether a value is a layer of torch, made of nothing but layers of torch: others may leave parameters unused."""
    value = program.value(value)
    if not isinstance(value, ast.Call) or not program.called(value).startswith("torch.nn."):
        return False
    if program.called(value) == "torch.nn.Sequential":
        return all(_is_known(program, each) for each in value.args)
    if program.called(value) in STACKS:
        return _is_known(program, argument(value, STACKS[program.called(value)], 0))
    return program.called(value) not in ("torch.nn.ModuleList", "torch.nn.ModuleDict", "torch.nn.Transformer")


def _in_result(forward: ast.FunctionDef) -> set[str]:
    """The submodules whose results are part of the only tensor that a straight forward returns."""
    known: dict[str, set[str]] = {}
    for statement in forward.body:
        if any(isinstance(node, ast.Compare) for node in ast.walk(statement)):
            return set()
        if any(isinstance(node, ast.Attribute) and node.attr in CUTTING for node in ast.walk(statement)):
            return set()
        if isinstance(statement, ast.Return):
            is_one = not isinstance(statement.value, ast.Tuple | ast.List | ast.Dict)
            return _used(statement.value, known) if is_one and statement.value else set()
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if not isinstance(target, ast.Name):
                return set()
            known[target.id] = _used(statement.value, known)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return set()
    return set()


def _used(node: ast.AST, known: dict[str, set[str]]) -> set[str]:
    """The submodules that an expression calls, itself or by way of variables."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found |= known.get(each.id, set())
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and is_of_self(each.func):
            found.add(each.func.attr)
    return found


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return {}

"""
ALL = NET.format("self.b(self.a(x))")
DDP = "net = nn.parallel.DistributedDataParallel({}, find_unused_parameters=True)"

RULE = Rule(
    id="find-unused-parameters",
    summary="DistributedDataParallel looks for unused parameters of a module that has none",
    why="With find_unused_parameters=True every step walks the whole autograd graph before backward. It is needed only "
    "if some parameters get no gradient in some steps. The rule speaks only of torchvision's classifiers, and of "
    "classes in the same file whose forward, without a branch, returns one tensor that every submodule has a part in.",
    fix="Remove find_unused_parameters=True.",
    find=find,
    wrong=(
        ALL + DDP.format("Net()") + "  # <-\n",
        NET.replace("return {}", "y = self.a(x)\n        z = self.b(x)\n        return y + z.relu()")
        + DDP.format("Net()")
        + "  # <-\n",
        ALL + "net = Net()\nwrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)  # <-\n",
        ALL + DDP.format("Net().cuda()") + "  # <-\n",
        ALL + DDP.format("Net().to(rank), device_ids=[rank]") + "  # <-\n",
        ALL + "def main():\n    base = Net()\n    " + DDP.format("base") + "  # <-\n",
        ALL + "from torch.nn.parallel import DistributedDataParallel as D\n"
        "net = D(module=Net(), find_unused_parameters=True, bucket_cap_mb=10)  # <-\n",
        ALL + "net = Net()\nif distributed:\n    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)\n    "
        "net = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)  # <-\n",
        ALL.replace("(self):", "(self, size=8):").replace("super", "self.size = size\n        super")
        + DDP.format("Net()")
        + "  # <-\n",
        ALL.replace("nn.Linear(8, 8)", "nn.Sequential(nn.Linear(size(), 8), nn.ReLU())")
        + DDP.format("Net()")
        + "  # <-\n",
        ALL.replace("    def forward", "        self.drop = nn.Dropout()\n\n    def forward")
        + DDP.format("Net()")
        + "  # <-\n",
        "import torchvision\n" + DDP.format("torchvision.models.resnet18(num_classes=10).to(rank)") + "  # <-\n",
    ),
    right=(
        NET.format("self.a(x)") + DDP.format("Net()"),
        NET.format("self.a(x) if x.sum() > 0 else self.b(x)") + DDP.format("Net()"),
        NET.format("[self.a(y) for y in self.b(x)]") + DDP.format("Net()"),
        DDP.format("net"),
        "from mine import Net\n" + DDP.format("Net()"),
        NET.format("self.a(x), self.b(x)") + DDP.format("Net()"),
        NET.format("self.b(self.a(x).detach())") + DDP.format("Net()"),
        NET.format("{'a': self.a(x), 'b': self.b(x)}") + DDP.format("Net()"),
        NET.replace("return {}", "y = self.a(x)\n        y = self.b(x)\n        return y") + DDP.format("Net()"),
        NET.replace("return {}", "with torch.no_grad():\n            x = self.b(x)\n        return self.a(x)")
        + DDP.format("Net()"),
        ALL + "net = nn.parallel.DistributedDataParallel(Net())",
        ALL + "def test_net():\n    " + DDP.format("Net()"),
        ALL + "net = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=False)",
        ALL + "net = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=args.unused)",
        ALL.replace("nn.Linear(8, 8)", "Head()") + DDP.format("Net()"),
        ALL.replace("nn.Linear(8, 8)", "nn.Sequential(Head())") + DDP.format("Net()"),
        ALL.replace("nn.Linear(8, 8)", "nn.Sequential(*heads)") + DDP.format("Net()"),
        NET.format("self.b(self.a(x).long())") + DDP.format("Net()"),
        NET.format("self.b((self.a(x) > 0) * x)") + DDP.format("Net()"),
        NET.format("self.b(self.a(x).max(1)[1])") + DDP.format("Net()"),
        ALL.replace("(nn.Module)", "(Base)") + DDP.format("Net()"),
        ALL.replace("    def forward", "    def add(self):\n        self.c = nn.Linear(8, 8)\n\n    def forward")
        + DDP.format("Net()"),
        ALL.replace("(self):", "(self, head=None):").replace("super", "self.head = head\n        super")
        + DDP.format("Net()"),
        ALL.replace("(self):", "(self, head):").replace("super", "self.head = head\n        super")
        + DDP.format("Net(head)"),
        ALL.replace("nn.Linear(8, 8)", "nn.Linear(8, 8) if a else nn.Identity()") + DDP.format("Net()"),
        "import torchvision\n" + DDP.format("torchvision.models.inception_v3()"),
        "import torchvision\n" + DDP.format("torchvision.models.detection.fasterrcnn_resnet50_fpn()"),
        "from mine import models\n" + DDP.format("models.resnet18()"),
        ALL + "net = Net()\nif other:\n    net = Other()\n" + DDP.format("net"),
    ),
)
