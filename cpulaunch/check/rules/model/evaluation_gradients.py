"""A module in eval mode that records gradients which are not used."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import NAMED, inside, is_in_test, is_without_gradients
from cpulaunch.check.source.models import MOVES
from cpulaunch.check.source.program import ParsedProgram, is_of_self, method, receiver

USES = {
    "backward",
    "grad",
    "requires_grad",
    "requires_grad_",
    "autograd",
    "set_grad_enabled",
    "train",
    "manual_backward",
}
"""Names of attributes: a scope that has one may use gradients, or switch them off elsewhere."""
LIBRARIES = ("torch.autograd.", "torch.func.", "functorch.")
SWITCHES = ("torch.set_grad_enabled", "torch.autograd.set_grad_enabled", "torch.autograd.grad_mode.set_grad_enabled")
OTHERWISE = re.compile(r"volatile=|_set_grad_enabled|quantiz|\btorch\.ao\b")
"""Words of programs for an old torch, and of those whose modules have no parameters any more."""
FREEZES = re.compile(r"requires_grad|freez|frozen", re.IGNORECASE)
"""Names of what makes a module record no gradients."""
DEPTH = 4
"""Callers of callers that are asked whether they switch gradients off."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """The first call of a module after its eval(), in a function that uses no gradients."""
    if OTHERWISE.search(program.text) or any(program.called(call) in SWITCHES for call in program.calls):
        return
    switched = {program.function(call) for call in program.calls if method(call) == "eval"}
    for scope in program.nodes:
        if scope in switched and isinstance(scope, (*NAMED, ast.Module)):
            yield from _in_scope(program, scope)


def _in_scope(program: ParsedProgram, scope: ast.AST) -> Iterator[Hit]:
    body = inside(program, scope)
    if any(_uses_gradients(program, node) for node in body) or _called_without(program, scope):
        return
    calls: defaultdict[str, list[ast.Call]] = defaultdict(list)
    stored: defaultdict[str, list[int]] = defaultdict(list)
    switches: dict[str, int] = {}
    for node in body:
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            calls[ast.unparse(node.func) if _is_variable(node.func) else ""].append(node)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_variable(node):
            stored[ast.unparse(node)].append(node.lineno)
        module = _switched(program, node)
        if module is not None and not is_in_test(program, node):
            switches.setdefault(ast.unparse(module), getattr(node, "end_lineno", 0))
    is_frozen = _may_be_frozen(program, scope)
    for name, line in switches.items():
        if is_frozen and name.startswith("self."):
            continue
        for call in sorted(calls[name], key=lambda each: (each.lineno, each.col_offset)):
            if any(line < each <= call.lineno for each in stored[name]):
                break  # It has another value: a traced and frozen module records no gradients, say.
            if call.lineno > line and not is_without_gradients(program, call):
                yield Hit(node=call, seen=f"{name} is in eval mode and called without no_grad or inference_mode")
                break


def _may_be_frozen(program: ParsedProgram, scope: ast.AST) -> bool:
    """Whether any method of a scope's class, or a function of this file that one of them calls, freezes a module."""
    owner = program.class_of(scope)
    nodes = [] if owner is None else [*ast.walk(owner)]
    called = [program.value(node.func) for node in nodes if isinstance(node, ast.Call)]
    parts = [*nodes, *(part for each in called if isinstance(each, NAMED) for part in ast.walk(each))]
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in parts)
    return any(isinstance(name, str) and FREEZES.search(name) for name in names)


def _uses_gradients(program: ParsedProgram, node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in USES:
        return True
    name = program.dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return name.startswith(LIBRARIES) and not name.endswith(".Variable")


def _is_variable(node: ast.AST) -> bool:
    """Whether an expression is a name, or an attribute of self."""
    return isinstance(node, ast.Name) or is_of_self(node)


def _switched(program: ParsedProgram, switch: ast.AST) -> ast.expr | None:
    """What is in eval mode after a statement `net.eval()`, `net.to(device).eval()` or `net = Net().eval()`."""
    if method(switch) != "eval" or not isinstance(switch, ast.Call) or switch.args or switch.keywords:
        return None
    parent = program.parents[switch]
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and _is_variable(parent.targets[0]):
        return parent.targets[0]
    module = receiver(switch)
    while method(module or switch) in MOVES and not _is_variable(module or switch):
        module = receiver(module or switch)
    return module if isinstance(parent, ast.Expr) and module is not None and _is_variable(module) else None


@lru_cache(maxsize=1024)
def _called_without(program: ParsedProgram, scope: ast.AST, depth: int = DEPTH) -> bool:
    """Whether a function has a decorator, is called where gradients are off, or may be by the library of its class."""
    if not isinstance(scope, NAMED):
        return False
    if scope.decorator_list or _is_given_away(program, scope):
        return True
    owner = program.parents[scope]
    if isinstance(owner, ast.ClassDef) and owner.bases:
        return True
    calls = _calls_by_name(program).get(scope.name, ())
    if any(is_without_gradients(program, call) for call in calls):
        return True
    callers = {program.function(call) for call in calls} - {scope} if depth else set()
    return any(_called_without(program, each, depth - 1) for each in callers if not _is_method(program, each))


def _is_method(program: ParsedProgram, function: ast.AST) -> bool:
    return isinstance(program.parents.get(function), ast.ClassDef)


@lru_cache(maxsize=2)
def _calls_by_name(program: ParsedProgram) -> Mapping[str, Sequence[ast.Call]]:
    """The name of a function or a method -> its calls, and those of others with this name."""
    found: defaultdict[str, list[ast.Call]] = defaultdict(list)
    for call in program.calls:
        found[method(call) or getattr(call.func, "id", "")].append(call)
    return found


def _is_given_away(program: ParsedProgram, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function that another one defines is used as a value: who calls it decides about gradients."""
    if not isinstance(program.function(function), NAMED):
        return False
    uses = (node for node in ast.walk(program.function(function)) if isinstance(node, ast.Name))
    return any(
        node.id == function.name and getattr(program.parents[node], "func", None) is not node
        for node in uses
        if isinstance(node.ctx, ast.Load)
    )


EVAL = "net.eval()\n"

RULE = Rule(
    id="evaluation-gradients",
    summary="A module in eval mode is called without no_grad or inference_mode",
    why="eval() switches dropout and batch normalization, not autograd: the forward still records a graph and keeps "
    "its activations, which costs memory and time for gradients that are not used. The rule is silent in functions "
    "that use gradients anywhere, have decorators, or are called in the file where gradients are off, in methods of "
    "classes with a base, which may be called so from elsewhere, and about modules of an object whose class "
    "freezes one.",
    fix="Call the module under `with torch.inference_mode():` (or torch.no_grad()), or run the program with "
    "`cpulaunch --inference-mode`.",
    find=find,
    wrong=(
        EVAL + "y = net(x)  # <-\n",
        "def predict(net, x):\n    net.eval()\n    return net(x).argmax(1)  # <-\n",
        "def score(net, loader):\n    net.eval()\n    for x, y in loader:\n        out = net(x)  # <-\n",
        EVAL + "with torch.autocast('cpu'):\n    y = net(x)  # <-\n",
        EVAL + "y = net(x)  # <-\nz = net(y)\n",
        "def main():\n    net = build()\n    net.eval()\n    print(net(torch.ones(1, 3)))  # <-\n",
        "net = build().to(device).eval()\nfor batch in loader:\n    out = net(**batch)  # <-\n",
        "def score(net, x):\n    net.to('cpu').eval()\n    return net(x=x)  # <-\n",
        "def test(net, loader):\n    net.eval()\n    for x, y in loader:\n        hits += (net(x) == y).sum()  # <-\n",
        "class Predictor:\n    def __call__(self, x):\n        self.net.eval()\n        return self.net(x)  # <-\n",
        "class Predictor:\n    def __init__(self, net):\n        self.net = net\n        self.net.eval()\n\n"
        "    def warm_up(self):\n        self.net.eval()\n        self.net(torch.ones(1))  # <-\n",
        "async def predict(net, x):\n    net.eval()\n    return net(x)  # <-\n",
    ),
    right=(
        EVAL + "with torch.no_grad():\n    y = net(x)\n",
        EVAL + "with torch.inference_mode():\n    y = net(x)\n",
        "@torch.no_grad()\ndef predict(net, x):\n    net.eval()\n    return net(x)\n",
        EVAL + "y = net(x)\ny.sum().backward()\n",
        EVAL + "y = net(x)\ng = torch.autograd.grad(y, x)\n",
        "y = net(x)\n" + EVAL,
        EVAL + "y = other(x)\n",
        "torch.set_grad_enabled(False)\n" + EVAL + "y = net(x)\n",
        EVAL + "net.requires_grad_(False)\ny = net(x)\n",
        "def predict(net, x):\n    net.eval()\n    return net(x)\n\nwith torch.no_grad():\n    predict(net, x)\n",
        EVAL + "y = net.generate(x)\n",
        "def test_net(net, x):\n    net.eval()\n    assert net(x).sum() == 1\n",
        EVAL + "with quiet():\n    y = net(x)\n",
        "class Task(BenchmarkModel):\n    def eval(self):\n        net = self.net\n        net.eval()\n"
        "        return net(self.x)\n",
        EVAL + "net = torch.jit.freeze(torch.jit.trace(net, x))\ny = net(x)\n",
        "def make_step(net):\n    def step(x):\n        net.eval()\n        return net(x)\n    return step\n",
        "def step(net, x):\n    net.eval()\n    y = net(x)\n    net.train()\n    return y\n",
        "from torch.autograd import grad\n" + EVAL + "y = net(x)\ng = grad(y.sum(), x)\n",
        "from torch.func import jacrev\n" + EVAL + "y = net(x)\nj = jacrev(net)(x)\n",
        "net = build().eval()\nnet = torch.jit.freeze(torch.jit.script(net))\ny = net(x)\n",
        "net = build().eval()\nwith torch.inference_mode():\n    y = net(**x)\n",
        "def predict(net, x):\n    net.eval()\n    return net(x)\n\ndef score(net, x):\n    return predict(net, x)\n\n"
        "@torch.no_grad()\ndef main():\n    score(net, x)\n",
        EVAL + "torch.quantization.convert(net, inplace=True)\ny = net(x)\n",
        "def test():\n    net = build()\n    net.eval()\n    print(net(torch.ones(1)).size())\n",
        "class Judge:\n    def __init__(self, net):\n        self.net = net.requires_grad_(False)\n\n"
        "    def __call__(self, x):\n        self.net.eval()\n        return self.net(x)\n",
        "class Judge:\n    def __init__(self, net):\n        self.net = net\n"
        "        for each in self.net.parameters():\n            each.requires_grad = False\n\n"
        "    def __call__(self, x):\n        self.net.eval()\n        return self.net(x)\n",
        "def still(net):\n    for each in net.parameters():\n        each.requires_grad = False\n\n"
        "class Judge:\n    def __init__(self, net):\n        self.net = net\n        still(self.net)\n\n"
        "    def __call__(self, x):\n        self.net.eval()\n        return self.net(x)\n",
        "class Judge:\n    def __init__(self, net):\n        self.net = freeze(net)\n\n"
        "    def __call__(self, x):\n        self.net.eval()\n        return self.net(x)\n",
        "value = formula.eval()\nprint(value)\n",
    ),
)
