"""A bias that the batch normalization behind it cancels."""

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.program import (
    FUNCTIONS,
    ParsedProgram,
    argument,
    is_constant,
    is_of_self,
    is_open,
    method,
    receiver,
)

DIMENSIONS = ("1d", "2d", "3d")
NORMS = {f"torch.nn.{name}{size}" for name in ("BatchNorm", "LazyBatchNorm") for size in DIMENSIONS}
NORMS |= {"torch.nn.SyncBatchNorm"}
CONVOLUTIONS = {f"torch.nn.{name}{size}" for name in ("Conv", "ConvTranspose") for size in DIMENSIONS}
LINEAR = "torch.nn.Linear"
LAYERS = CONVOLUTIONS | {LINEAR}
MAX_POSITIONAL = 6
"""With more, the bias may be one of them."""
UNSAFE = (
    "the bias is no longer in the model's checkpoints, trained ones need it subtracted from running_mean, and other "
    "files may use it"
)
GUARD = re.compile(r"\.bias is (not )?None|^(not )?\w+(\.\w+)*\.bias$")
"""How programs ask whether a layer has a bias."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Layers with a bias right before a batch normalization, in a Sequential or a list, or called so in forward."""
    for node in program.nodes:
        is_list = isinstance(node, ast.List) and program.called(program.parents[node]) != "torch.nn.ModuleList"
        if is_list or program.called(node) == "torch.nn.Sequential":
            layers = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
            for first, second in itertools.pairwise(layers):
                yield from _hit(program, _named(first), _named(second))
        elif isinstance(node, ast.ClassDef):
            yield from _in_class(program, node)
        elif isinstance(node, ast.Expr):
            yield from _added_in_turn(program, node)


def _named(node: ast.AST) -> ast.AST:
    """The layer of a pair of name and layer, as in an OrderedDict."""
    if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
        return node
    is_name = isinstance(node.elts[0], ast.Constant | ast.JoinedStr | ast.BinOp | ast.Name)
    return node.elts[1] if is_name else node


def _added_in_turn(program: ParsedProgram, first: ast.Expr) -> Iterator[Hit]:
    """A layer and the next one which two statements in turn add to the same list or Sequential."""
    before, owner = _added(first)
    if before is None or owner is None:
        return
    block = next((each for each in _blocks(program.parents[first]) if first in each), [])
    place = block.index(first) + 1 if block else 0
    second = block[place] if 0 < place < len(block) else None
    after, other = _added(second)
    made = program.value(owner)
    is_list = isinstance(made, ast.List) or program.called(made) == "torch.nn.Sequential"
    if after is not None and other is not None and is_list and ast.unparse(owner) == ast.unparse(other):
        yield from _hit(program, before, after)


def _blocks(node: ast.AST) -> Iterator[list[ast.AST]]:
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _added(statement: ast.AST | None) -> tuple[ast.expr | None, ast.expr | None]:
    """What `layers.append(layer)` or `net.add_module(name, layer)` adds, and to what."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    count = {"append": 1, "add_module": 2}.get(method(call), 0) if call else 0
    if not isinstance(call, ast.Call) or not count or len(call.args) != count:
        return None, None
    owner = receiver(call)
    is_self = isinstance(owner, ast.Name) and owner.id == "self"
    return (None, None) if is_self else (call.args[-1], owner)


def _hit(program: ParsedProgram, first: ast.AST, second: ast.AST) -> Iterator[Hit]:
    name = program.called(first)
    if name not in LAYERS or program.called(second) not in NORMS or not isinstance(first, ast.Call):
        return
    bias = argument(first, "bias")
    if (
        is_open(first)
        or _differ(program, first, second)
        or len(first.args) > (2 if name == LINEAR else MAX_POSITIONAL)
        or not (bias is None or is_constant(bias, True))
    ):
        return
    seen = f"the bias of {name.removeprefix('torch.')} is subtracted again by the batch normalization after it"
    edit = None if _uses_biases(program) else CallEdit(set={"bias": "False"}, unsafe=UNSAFE)
    yield Hit(node=first, seen=seen, edit=edit)


def _differ(program: ParsedProgram, layer: ast.Call, norm: ast.AST) -> bool:
    """Whether the normalization is over another dimension than the layer's outputs, as far as constants tell.

    After a linear layer it may be over the steps of a sequence: then the two sizes are different expressions.
    """
    name = "out_features" if program.called(layer) == LINEAR else "out_channels"
    given = argument(layer, name, 1), argument(norm, "num_features", 0) if isinstance(norm, ast.Call) else None
    made, normalized = map(program.value, given)
    if isinstance(made, ast.Constant) and isinstance(normalized, ast.Constant):
        return made.value != normalized.value
    is_named_alike = made is None or normalized is None or ast.unparse(made) == ast.unparse(normalized)
    return program.called(layer) == LINEAR and not is_named_alike


@lru_cache(maxsize=2)
def _uses_biases(program: ParsedProgram) -> bool:
    """Whether the program uses the biases of layers without asking whether there are any: to initialize them, say.

    So may a function from elsewhere that it applies to all layers.
    """
    uses = (node for node in program.nodes if isinstance(node, ast.Attribute) and node.attr == "bias")
    applied = [call.args[0] for call in program.calls if method(call) == "apply" and len(call.args) == 1]
    applied += [call.func for call in program.calls if any(method(each) == "modules" for each in call.args)]
    known = (*FUNCTIONS, ast.Call)
    return not all(_is_asked(program, each) for each in uses) or any(
        isinstance(each, ast.Name | ast.Attribute) and not isinstance(program.value(each), known) for each in applied
    )


def _is_asked(program: ParsedProgram, use: ast.AST) -> bool:
    """Whether a bias is used only if there is one, or in asking so."""
    tests = [each.test for each in program.around(use) if isinstance(each, ast.If | ast.IfExp)]
    tests += [each for each in program.around(use) if isinstance(each, ast.BoolOp | ast.Compare)]
    return any(GUARD.search(ast.unparse(test)) for test in tests)


def _in_class(program: ParsedProgram, owner: ast.ClassDef) -> Iterator[Hit]:
    """Pairs self.norm(self.layer(x)), and x = self.layer(x); x = self.norm(x), of layers that are used once."""
    attributes = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and is_of_self(node))
    uses = Counter(node.attr for node in attributes if isinstance(node.ctx, ast.Load))
    for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call) and is_of_self(node.func)):
        inner = _input(program, call)
        if not isinstance(inner, ast.Call) or not is_of_self(inner.func) or program.class_of(call) is not owner:
            continue
        layer, norm = inner.func, call.func
        if isinstance(layer, ast.Attribute) and uses[layer.attr] == 1:
            yield from _hit(program, program.value(layer) or layer, program.value(norm) or norm)


def _input(program: ParsedProgram, call: ast.Call) -> ast.AST | None:
    """What made a call's only argument: the argument, or the statement right before that assigns it."""
    if len(call.args) != 1 or call.keywords:
        return None
    given = call.args[0]
    statement = next((each for each in program.around(call) if isinstance(each, ast.stmt)), None)
    if not isinstance(given, ast.Name) or statement is None:
        return given
    siblings = getattr(program.parents[statement], "body", [])
    if not isinstance(siblings, list) or statement not in siblings or siblings.index(statement) == 0:
        return None
    before = siblings[siblings.index(statement) - 1]
    is_made = isinstance(before, ast.Assign) and len(before.targets) == 1
    rebound = isinstance(statement, ast.Assign | ast.Return)
    if is_made and rebound and isinstance(before.targets[0], ast.Name) and before.targets[0].id == given.id:
        is_same = isinstance(statement, ast.Return) or any(
            isinstance(target, ast.Name) and target.id == given.id for target in getattr(statement, "targets", [])
        )
        return before.value if is_same or _is_used_once(program, call, given.id) else None
    return None


def _is_used_once(program: ParsedProgram, call: ast.Call, name: str) -> bool:
    """Whether a function has a name twice: where it is assigned, and where it is used."""
    names = (each for each in ast.walk(program.function(call)) if isinstance(each, ast.Name) and each.id == name)
    return sum(1 for _ in names) == 2


NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)@
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
"""
FOUND, PLAIN = NET.replace("@", "  # <-"), NET.replace("@", "")

RULE = Rule(
    id="bias-before-norm",
    summary="A convolution or linear layer has a bias although a batch normalization follows",
    why="Batch normalization subtracts the mean of each channel, and the bias with it. The bias changes no result, yet "
    "it is added in every forward, and its gradient is computed and its optimizer state kept in training.",
    fix="Give the layer bias=False, before a model is trained. A checkpoint that was trained with the bias has it in "
    "the normalization's running_mean: subtract it there and remove the entry. Code in other files that initializes "
    "the bias must allow for None. So --fix changes it with --unsafe-fixes only.",
    find=find,
    wrong=(
        "net = nn.Sequential(\n    nn.Conv2d(3, 8, 3),  # <-\n    nn.BatchNorm2d(8),\n    nn.ReLU(),\n)\n",
        "net = nn.Sequential(nn.Linear(8, 8, bias=True), nn.BatchNorm1d(8))  # <-\n",
        "layers = [nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU()]  # <-\n",
        FOUND + "        return self.bn(self.conv(x))\n",
        FOUND + "        x = self.conv(x)\n        x = self.bn(x)\n        return x.relu()\n",
        FOUND + "        out = self.conv(x)\n        return self.bn(out)\n",
        "net = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.SyncBatchNorm(2))  # <-\n",
        "from collections import OrderedDict\nnet = nn.Sequential(OrderedDict([\n    ('a', nn.Linear(4, n)),  # <-\n"
        "    ('b', nn.BatchNorm1d(n)),\n]))\n",
        "layers = []\nfor a, b in sizes:\n    layers.append(nn.Conv2d(a, b, 3))  # <-\n"
        "    layers.append(nn.BatchNorm2d(b))\n",
        "net = nn.Sequential()\nnet.add_module('conv', nn.Conv2d(3, 8, 3))  # <-\n"
        "net.add_module('norm', nn.BatchNorm2d(8))\n",
        "net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # <-\nnn.init.zeros_(net[0].bias)\n",
        "net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # <-\nfor each in net:\n"
        "    if each.bias is not None:\n        each.bias.data.zero_()\n",
    ),
    right=(
        "net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))\n",
        "net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8))\n",
        "net = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.BatchNorm1d(8))\n",
        "blocks = [(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), (nn.ReLU(), nn.BatchNorm2d(8))]\n",
        "net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))\n",
        "net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(50))\n",
        "net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(steps))\n",
        "parts = nn.ModuleList()\nparts.append(nn.Linear(8, 8))\nparts.append(nn.BatchNorm1d(8))\n",
        "a.append(nn.Linear(8, 8))\nb.append(nn.BatchNorm1d(8))\n",
        "layers.append(nn.Conv2d(3, 8, 3))\nlayers.append(nn.ReLU())\nlayers.append(nn.BatchNorm2d(8))\n",
        "parts = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)])\n",
        "net = nn.Sequential(nn.Conv2d(3, 8, 3, **options), nn.BatchNorm2d(8))\n",
        "net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3))\n",
        PLAIN + "        return self.bn(self.conv(x).relu())\n",
        NET.replace(")@", ", bias=False)") + "        return self.bn(self.conv(x))\n",
        PLAIN + "        y = self.conv(x)\n        z = self.bn(y)\n        return y + z\n",
        PLAIN + "        return self.bn(self.conv(x)) + self.conv(x)\n",
        "net = nn.Sequential(nn.Conv2d(3, 8, 3), make_norm(8))\n",
        "from mine import nn\nnet = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\n",
    ),
)
