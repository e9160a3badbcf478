"""Where code runs: in a training loop, on every step, without gradients, on a GPU; only what is certain."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from cpulaunch.check.source.program import DEPTH, FUNCTIONS, ParsedProgram, is_constant, method, receiver

LOOPS = (ast.For, ast.AsyncFor, ast.While)
CONDITIONS = (ast.If, ast.IfExp, ast.Try, ast.TryStar, ast.Match, ast.ExceptHandler)
NO_GRADIENTS = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
NESTED = (*FUNCTIONS, ast.ClassDef)
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef)
WRAPPERS = {"enumerate", "tqdm", "trange", "track", "iter", "zip", "islice"}
ITERATORS = {"iter", "islice", "enumerate", "zip", "track"}
"""Those whose result is run over once, however often a loop around goes on with it."""
LONGEST = 100
"""Parts of a zip, and wrappers in wrappers, that are looked at."""
READS = ("item", "tolist", "cpu", "numpy")
"""Methods of a tensor that bring it, or its elements, to the CPU."""
ABOUT = ("shape", "dtype", "device", "size", "dim", "numel", "requires_grad", "ndim")
"""Attributes and methods of a tensor that say something about it without its elements."""
MEASURES = re.compile(r"prof|bench|trace|debug|timing|measure", re.IGNORECASE)
"""Names of functions whose purpose is to measure, or to find errors."""


@lru_cache(maxsize=64)
def inside(program: ParsedProgram, node: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes below a node, in the order of the text, without the bodies of functions and classes it defines."""
    found: list[ast.AST] = []
    waiting = [*reversed(program.children[node])]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, NESTED):
            found.append(each)
            waiting.extend(reversed(program.children[each]))
    return tuple(found)


@lru_cache(maxsize=2)
def training_loops(program: ParsedProgram) -> tuple[ast.AST, ...]:
    """The innermost loops that call backward and an optimizer's step: each turn is a training step."""
    backwards = (nearest_loop(program, call) for call in program.calls if method(call) == "backward")
    loops = dict.fromkeys(loop for loop in backwards if loop is not None)
    return tuple(loop for loop in loops if any(method(node) == "step" for node in inside(program, loop)))


def nearest_loop(program: ParsedProgram, node: ast.AST) -> ast.AST | None:
    """The loop whose body, in the same function, a node is in."""
    before = node
    for each in program.around(node):
        if isinstance(each, FUNCTIONS):
            return None
        if isinstance(each, LOOPS) and before is not getattr(each, "iter", None):
            return each
        before = each
    return None


def is_unconditional(program: ParsedProgram, node: ast.AST, within: ast.AST) -> bool:
    """Whether a node runs whenever the node around it does, as far as the source says."""
    for each in program.around(node):
        if each is within:
            return True
        if isinstance(each, (*CONDITIONS, *FUNCTIONS)) and not _is_main(each):
            return False
    return False


def _is_main(node: ast.AST) -> bool:
    """Whether a node is `if __name__ == "__main__":`, which holds whenever a program runs."""
    test = node.test if isinstance(node, ast.If) and not node.orelse else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    parts = (test.left, test.comparators[0])
    is_name = any(isinstance(each, ast.Name) and each.id == "__name__" for each in parts)
    return is_name and any(is_constant(each, "__main__") for each in parts)


def iterated(program: ParsedProgram, loop: ast.AST) -> Iterator[ast.expr]:
    """What a for loop runs over, without enumerate, tqdm and the like around it."""
    return (node for node, _ in passes(program, loop))


def passes(program: ParsedProgram, loop: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """What a for loop runs over, each with what begins a pass: the loop, or the call that made an iterator before."""
    waiting: list[tuple[ast.expr, ast.AST]] = [(loop.iter, loop)] if isinstance(loop, ast.For | ast.AsyncFor) else []
    for _ in range(LONGEST):
        if not waiting:
            return
        node, start = waiting.pop()
        call = next((each for each in (node, program.value(node)) if _wrapper(each)), None)
        if not isinstance(call, ast.Call):
            yield node, start
            continue
        is_before = _wrapper(call) in ITERATORS and loop not in program.around(call)
        waiting += [(each, call if is_before else start) for each in call.args]


def _wrapper(node: ast.AST | None) -> str:
    """The name of enumerate, tqdm and the like that a call calls with what it runs over; empty if it is none."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name if name in WRAPPERS else ""


def is_without_gradients(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a `with` block or a decorator around a node switches gradients off, or may do so."""
    for each in program.around(node):
        if isinstance(each, ast.With | ast.AsyncWith) and any(_switches_off(program, item) for item in each.items):
            return True
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.decorator_list:
            return True
    return False


def _switches_off(program: ParsedProgram, item: ast.withitem) -> bool:
    """Contexts whose meaning the source does not say count too."""
    name = program.called(item.context_expr)
    return name in NO_GRADIENTS or not name.startswith(("torch.autocast", "torch.amp", "torch.cuda", "torch.profiler"))


def is_on_gpu(program: ParsedProgram, node: ast.AST, depth: int = DEPTH) -> bool:
    """Whether an expression is a CUDA device, or is one on a machine that has one."""
    return depth > 0 and any(_is_cuda(program, each, depth - 1) for each in program.values(node))


def _is_cuda(program: ParsedProgram, value: ast.AST, depth: int) -> bool:
    if program.called(value) == "torch.device" and isinstance(value, ast.Call) and value.args:
        return is_on_gpu(program, value.args[0], depth)
    if program.called(value) == "torch.accelerator.current_accelerator":
        return True
    if isinstance(value, ast.IfExp):
        return is_on_gpu(program, value.body, depth) or is_on_gpu(program, value.orelse, depth)
    if isinstance(value, ast.JoinedStr) and value.values:
        value = value.values[0]
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith("cuda")


def moves_to_gpu(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node is a call that moves something to a GPU."""
    if method(node) == "cuda" and not program.called(node).startswith("torch."):
        return True
    if method(node) != "to" or not isinstance(node, ast.Call):
        return False
    given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "device")]
    return any(is_on_gpu(program, each) for each in given)


def names_on_gpu(program: ParsedProgram, loop: ast.AST) -> set[str]:
    """The names that a loop gives tensors which it moves to a GPU, or what it computes from these."""
    found: set[str] = set()
    statements = [(_targets(node), node) for node in inside(program, loop) if _targets(node)]
    while True:
        new = {
            name
            for names, node in statements
            if not found.issuperset(names) and is_from_gpu(program, _given(node), found)
            for name in names
        }
        if not new - found:
            return found
        found |= new


def is_from_gpu(program: ParsedProgram, node: ast.AST | None, names: Iterable[str]) -> bool:
    """Whether an expression moves something to a GPU or computes with one of these names, and stays there."""
    waiting: list[ast.AST] = [] if node is None else [node]
    while waiting:
        each = waiting.pop()
        if moves_to_gpu(program, each):
            return True
        if method(each) in READS or (isinstance(each, ast.Attribute) and each.attr in ABOUT):
            continue
        if isinstance(each, ast.Name) and each.id in names:
            return True
        waiting.extend(program.children[each])
    return False


def _targets(node: ast.AST) -> tuple[str, ...]:
    """The names that a node assigns to."""
    targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        targets = [node.target]
    names = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    return tuple(each.id for each in names if isinstance(each.ctx, ast.Store))


def _given(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.For):
        return node.iter
    return node.value if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else None


def is_measuring(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node is in a function that measures or debugs, by its name."""
    return any(MEASURES.search(getattr(each, "name", "")) for each in program.around(node) if isinstance(each, NAMED))


def is_in_test(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node is in a test, by its function's name; `test(net, loader)` measures how good a network is."""
    return any(
        each.name.startswith("test") and (each.name != "test" or not _is_given_data(program, each))
        for each in program.around(node)
        if isinstance(each, NAMED)
    )


def _is_given_data(program: ParsedProgram, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has parameters, and nothing in it is asserted."""
    names = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    return bool(names) and not any(isinstance(node, ast.Assert) for node in inside(program, function))


def is_off(node: ast.AST | None) -> bool:
    """Whether a switch is absent or a constant that is false."""
    return node is None or is_constant(node, False, 0, None)


def root_name(node: ast.AST | None) -> str:
    """The variable that an expression begins with, as `loss` in `loss.detach().mean()`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = receiver(node) if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
