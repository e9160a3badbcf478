"""A module in eval mode that records gradients which are not used."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, is_without_gradients
from cpulaunch.check.source.program import ParsedProgram, method, receiver

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


def find(program: ParsedProgram) -> Iterator[Hit]:
    """The first call of a module after its eval(), in a function that uses no gradients."""
    if any(program.called(call) == "torch.set_grad_enabled" for call in program.calls):
        return
    switched = {program.function(call) for call in program.calls if method(call) == "eval"}
    for scope in program.nodes:
        if scope in switched and isinstance(scope, ast.FunctionDef | ast.Module) and not is_in_test(program, scope):
            yield from _in_scope(program, scope)


def _in_scope(program: ParsedProgram, scope: ast.FunctionDef | ast.Module) -> Iterator[Hit]:
    body = list(inside(program, scope))
    if any(isinstance(node, ast.Attribute) and node.attr in USES for node in body) or _called_without(program, scope):
        return
    if isinstance(scope, ast.FunctionDef) and scope.name.startswith("test"):
        return
    calls = sorted(
        (node for node in body if isinstance(node, ast.Call)), key=lambda node: (node.lineno, node.col_offset)
    )
    seen: set[str] = set()
    for switch in calls:
        module = receiver(switch) if method(switch) == "eval" and not switch.args else None
        if not isinstance(module, ast.Name) or module.id in seen or not _is_statement(program, switch):
            continue
        seen.add(module.id)
        for call in calls:
            is_later = call.lineno > switch.lineno and isinstance(call.func, ast.Name)
            if is_later and _is_assigned(body, module.id, switch, call):
                break
            if is_later and call.args and program.same(call.func, module) and not is_without_gradients(program, call):
                yield Hit(node=call, seen=f"{module.id} is in eval mode and called without no_grad or inference_mode")
                break


def _is_assigned(body: list[ast.AST], name: str, first: ast.Call, last: ast.Call) -> bool:
    """Whether a name gets another value between two calls: a traced and frozen module records no gradients, say."""
    stores = (node for node in body if isinstance(node, ast.Name) and node.id == name)
    return any(isinstance(node.ctx, ast.Store) and first.lineno < node.lineno <= last.lineno for node in stores)


def _is_statement(program: ParsedProgram, call: ast.Call) -> bool:
    return isinstance(program.parents[call], ast.Expr)


def _called_without(program: ParsedProgram, scope: ast.AST) -> bool:
    """Whether a function has a decorator, is called where gradients are off, or may be by the library of its class."""
    if not isinstance(scope, ast.FunctionDef):
        return False
    if scope.decorator_list or _is_given_away(program, scope):
        return True
    owner = program.parents[scope]
    if isinstance(owner, ast.ClassDef) and owner.bases:
        return True
    calls = [call for call in program.calls if scope.name in (method(call), getattr(call.func, "id", ""))]
    return any(is_without_gradients(program, call) for call in calls)


def _is_given_away(program: ParsedProgram, function: ast.FunctionDef) -> bool:
    """Whether a function that another one defines is used as a value: who calls it decides about gradients."""
    if not isinstance(program.function(function), ast.FunctionDef):
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
    "that use gradients anywhere, have decorators, or are called in the file where gradients are off, and in methods "
    "of classes with a base, which may be called so from elsewhere.",
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
    ),
)
