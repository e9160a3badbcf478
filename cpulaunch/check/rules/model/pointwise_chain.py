"""Activations and chains of pointwise operations that are written out, each a pass over memory of its own."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, is_constant, method, receiver

COMPILED = re.compile(r"torch\.compile|jit\.script|jit\.trace|torch\.fx|script_method|onnx", re.IGNORECASE)
POINTWISE = {"tanh", "sigmoid", "exp", "log", "pow", "sqrt", "square", "erf", "softplus", "log1p", "expm1", "rsqrt"}
MODULES = ("torch.", "torch.nn.functional.", "torch.special.")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """silu, mish and gelu written as products, in programs that are not compiled or exported."""
    if COMPILED.search(program.text):
        return
    for node in program.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and not is_in_test(program, node):
            name = _activation(program, node)
            if name and not _is_used(program, name):
                yield Hit(node=node, seen=f"{ast.unparse(node)} is torch.nn.functional.{name} in several operations")


@lru_cache(maxsize=8)
def _is_used(program: ParsedProgram, name: str) -> bool:
    """Whether a program uses torch's own as well, so that the product may be its stand-in for an old torch."""
    uses = (node for node in program.nodes if isinstance(node, ast.Attribute) and node.attr.lower() == name)
    return any(program.dotted(each) for each in uses)


def _activation(program: ParsedProgram, node: ast.BinOp) -> str:
    """The activation that a product is: its factors are a tensor and a function of the same tensor."""
    factors = list(_factors(node))
    if isinstance(program.parents[node], ast.BinOp) and isinstance(program.parents[node].op, ast.Mult):  # type: ignore[attr-defined]
        return ""
    names = [each for each in factors if isinstance(each, ast.Name | ast.Attribute)]
    rest = [each for each in factors if not isinstance(each, ast.Name | ast.Attribute)]
    if len(names) != 1:
        return ""
    text = ast.dump(names[0])
    if len(rest) == 1:
        return "silu" if _is_sigmoid(program, rest[0], text) else "mish" if _is_mish(program, rest[0], text) else ""
    halves = [each for each in rest if is_constant(each, 0.5)]
    sums = [each for each in rest if isinstance(each, ast.BinOp)]
    return "gelu" if len(rest) == 2 and halves and sums and _is_gelu(program, sums[0], text) else ""


def _factors(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield node


def _applied(program: ParsedProgram, node: ast.AST, name: str) -> ast.expr | None:
    """What a pointwise function of torch, or a tensor's method of its name, is applied to."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    called = program.called(node)
    if len(node.args) == 1 and called in {f"{module}{name}" for module in MODULES}:
        return node.args[0]
    return receiver(node) if method(node) == name and not called and not node.args else None


def _is_sigmoid(program: ParsedProgram, node: ast.AST, text: str) -> bool:
    inner = _applied(program, node, "sigmoid")
    return inner is not None and ast.dump(inner) == text


def _is_mish(program: ParsedProgram, node: ast.AST, text: str) -> bool:
    outer = _applied(program, node, "tanh")
    inner = _applied(program, outer, "softplus") if outer is not None else None
    return inner is not None and ast.dump(inner) == text


def _is_gelu(program: ParsedProgram, node: ast.BinOp, text: str) -> bool:
    """Whether a sum is 1 + erf(x / sqrt(2)), or 1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))."""
    if not isinstance(node.op, ast.Add):
        return False
    terms = [each for each in (node.left, node.right) if not is_constant(each, 1, 1.0)]
    if len(terms) != 1:
        return False
    error = _applied(program, terms[0], "erf")
    tangent = _applied(program, terms[0], "tanh")
    of_tensor = any(ast.dump(each) == text for each in ast.walk(error or tangent or terms[0]))
    is_cubic = tangent is not None and any(is_constant(each, 0.044715) for each in ast.walk(tangent))
    return of_tensor and (isinstance(error, ast.BinOp) or is_cubic)


def _forward(line: str) -> str:
    head = "import math\n\nclass Act(nn.Module):\n    def forward(self, x):\n"
    return f"{head}        {line}\n"


RULE = Rule(
    id="pointwise-chain",
    summary="An activation is written out as several operations",
    why="Each operation reads and writes the whole tensor, and autograd keeps the results in between. torch's own "
    "function does it in one pass, with one saved tensor.",
    fix="Use torch.nn.functional.silu, mish or gelu (approximate='tanh' for the form with tanh); other chains fuse "
    "with torch.compile, or `cpulaunch --graph inductor` on the unedited program.",
    find=find,
    wrong=(
        _forward("return x * torch.sigmoid(x)  # <-"),
        _forward("return x * x.sigmoid()  # <-"),
        _forward("return x * F.sigmoid(x)  # <-"),
        _forward("return x * torch.tanh(F.softplus(x))  # <-"),
        _forward("return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))  # <-"),
        _forward("return 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * torch.pow(x, 3))))  # <-"),
        "def swish(x):\n    return torch.sigmoid(x) * x  # <-\n",
    ),
    right=(
        _forward("return F.silu(x)"),
        _forward("return y * torch.sigmoid(x)"),
        _forward("return x * torch.sigmoid(1.702 * x)"),
        _forward("return x * torch.tanh(x)"),
        _forward("return F.gelu(x)"),
        _forward("return x * gate(x)"),
        "net = torch.compile(net)\n" + _forward("return x * torch.sigmoid(x)"),
        "@torch.jit.script\ndef swish(x):\n    return x * torch.sigmoid(x)\n",
        _forward("return x * mine.sigmoid(x)").replace("import math", "import mine"),
        _forward("return 0.5 * x * (1.0 + scale)"),
        "def test_silu(x):\n    assert (F.silu(x) == x * torch.sigmoid(x)).all()\n",
        _forward("return x + torch.sigmoid(x)"),
        _forward("return x * torch.sigmoid(x)") + "\nACTIVATIONS = {'silu': nn.SiLU, 'export': Act}\n",
        _forward("return x * torch.sigmoid(x) if OLD else F.silu(x)"),
    ),
)
