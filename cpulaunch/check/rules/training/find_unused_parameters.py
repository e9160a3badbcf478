"""find_unused_parameters=True for a module that uses all of its parameters."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_of_self

NAMES = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp, ast.comprehension, ast.With)
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
        if not is_in_test(program, call) and _uses_all(program, _class_of(program, argument(call, "module", 0))):
            edit = CallEdit(remove=("find_unused_parameters",))
            yield Hit(node=call, seen="forward uses every submodule, yet find_unused_parameters=True", edit=edit)


def _class_of(program: ParsedProgram, node: ast.AST | None) -> ast.ClassDef | None:
    value = program.value(node)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda"):
        value = program.value(value.func.value)
    made = program.value(value.func) if isinstance(value, ast.Call) else None
    return made if isinstance(made, ast.ClassDef) else None


def _uses_all(program: ParsedProgram, owner: ast.ClassDef | None) -> bool:
    methods = {each.name: each for each in owner.body if isinstance(each, ast.FunctionDef)} if owner else {}
    if set(methods) != {"__init__", "forward"} or owner is None or len(owner.bases) != 1:
        return False
    forward = methods["forward"]
    if program.dotted(owner.bases[0]) != "torch.nn.Module" or any(isinstance(e, BRANCHES) for e in ast.walk(forward)):
        return False
    stored = [node for node in ast.walk(methods["__init__"]) if is_of_self(node) and _is_stored(node)]
    values = [program.value(node) for node in stored]
    if not stored or not all(_is_known(program, value) for value in values):
        return False
    return {node.attr for node in stored if isinstance(node, ast.Attribute)} <= _in_result(forward)


def _is_known(program: ParsedProgram, value: ast.AST | None) -> bool:
    """Whether a value is a layer of torch, made of nothing but layers of torch: others may leave parameters unused."""
    if not isinstance(value, ast.Call) or not program.called(value).startswith("torch.nn."):
        return False
    made = (each for each in ast.walk(value) if isinstance(each, ast.Call) and each is not value)
    given = (program.value(each) for each in value.args if isinstance(each, ast.Name | ast.Attribute | ast.Starred))
    return all(program.called(each).startswith("torch.nn.") for each in made) and all(
        isinstance(each, ast.Constant) for each in given
    )


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
    "if some parameters get no gradient in some steps. The rule speaks only where the module's class is in the same "
    "file and its forward, without a branch, returns one tensor that every submodule has a part in.",
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
        ALL.replace("    def forward", "    def other(self):\n        pass\n\n    def forward") + DDP.format("Net()"),
    ),
)
