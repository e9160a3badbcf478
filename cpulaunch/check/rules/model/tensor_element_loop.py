"""Python loops that compute with the elements of a tensor one by one."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, nearest_loop
from cpulaunch.check.source.program import ParsedProgram, method, receiver

FEW = 32
"""Elements that are read in no time, by a loop that is in no other one."""
PICTURES = {"imshow", "set_title", "title", "subplot", "add_subplot", "plot", "text"}
"""Methods that draw: a loop with one of them is about a few elements."""
LISTS = re.compile(r"losses|metrics|list\b|outputs", re.IGNORECASE)
"""Names of lists and tuples of tensors, which have no tolist()."""
DEBUGGING = re.compile(r"debug|verbose", re.IGNORECASE)
CLOCKS = ("time.time", "time.perf_counter", "time.process_time")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Nested loops over two sizes of a tensor that index it with both counters, and loops that read single elements."""
    for node in program.nodes:
        if not isinstance(node, ast.For) or is_in_test(program, node) or _is_aside(program, node):
            continue
        if _is_nested(program, node):
            yield Hit(node=node, seen="a Python loop computes with single elements of a tensor")
        elif _reads_elements(program, node):
            yield Hit(node=node, seen="a Python loop reads the elements of a tensor one by one")


def _is_aside(program: ParsedProgram, loop: ast.For) -> bool:
    """Whether a loop runs only in debugging, or is timed, so that it is there to be compared with others."""
    tests = [each.test for each in program.around(loop) if isinstance(each, ast.If)]
    block = getattr(program.parents[loop], "body", [])
    place = block.index(loop) if isinstance(block, list) and loop in block else 0
    before = [each for statement in block[:place][-1:] for each in ast.walk(statement)] if place else []
    is_timed = any(program.called(each) in CLOCKS for each in before)
    return is_timed or any(DEBUGGING.search(ast.unparse(test)) for test in tests)


def _is_nested(program: ParsedProgram, outer: ast.For) -> bool:
    """Whether a loop over a tensor's size contains one more, whose body uses t[i, j] or t[i][j] as single numbers."""
    first = _counted(program, outer)
    if first is None:
        return False
    for inner in inside(program, outer):
        second = _counted(program, inner)
        if second is None or not isinstance(inner, ast.For) or second[1] != first[1]:
            continue
        elements = [node for node in inside(program, inner) if _element(node, first[1], (first[0], second[0]))]
        if elements and not any(_is_shifted(node, {first[0], second[0]}) for node in inside(program, inner)):
            return True
    return False


def _counted(program: ParsedProgram, loop: ast.AST) -> tuple[str, str] | None:
    """Counter and tensor of `for i in range(t.size(0))`, or of `range(t.shape[0])` where torch made t."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
        return None
    if not isinstance(loop.iter.func, ast.Name) or loop.iter.func.id != "range" or len(loop.iter.args) != 1:
        return None
    size = program.value(loop.iter.args[0])
    if method(size or loop) == "size" and isinstance(size, ast.Call) and len(size.args) == 1:
        return loop.target.id, ast.unparse(receiver(size) or size)
    if isinstance(size, ast.Subscript) and isinstance(size.value, ast.Attribute) and size.value.attr == "shape":
        owner = size.value.value
        if program.called(program.value(owner)).startswith("torch."):
            return loop.target.id, ast.unparse(owner)
    return None


def _element(node: ast.AST, tensor: str, counters: tuple[str, str]) -> bool:
    """Whether an expression is t[i, j] or t[i][j], and nothing is left of it but a number."""
    if not isinstance(node, ast.Subscript):
        return False
    if isinstance(node.slice, ast.Tuple):
        names = [each.id for each in node.slice.elts if isinstance(each, ast.Name)]
        return len(names) == len(node.slice.elts) and set(counters) <= set(names) and ast.unparse(node.value) == tensor
    if isinstance(node.value, ast.Subscript):
        names = [each.id for each in (node.slice, node.value.slice) if isinstance(each, ast.Name)]
        return set(names) == set(counters) and ast.unparse(node.value.value) == tensor
    return False


def _is_shifted(node: ast.AST, counters: set[str]) -> bool:
    """Whether an index is computed from a counter, as in t[i - 1, j]: such loops depend on their own results."""
    if not isinstance(node, ast.Subscript):
        return False
    return any(
        isinstance(each, ast.Name) and each.id in counters
        for part in ast.walk(node.slice)
        if isinstance(part, ast.BinOp)
        for each in ast.walk(part)
    )


def _reads_elements(program: ParsedProgram, loop: ast.For) -> bool:
    """Whether every turn reads `t[i].item()` for the loop's counter, over a range."""
    is_range = isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range"
    if not is_range or not isinstance(loop.target, ast.Name) or _is_short(program, loop):
        return False
    if any(method(node) in PICTURES for node in inside(program, loop)):
        return False
    for node in inside(program, loop):
        if method(node) != "item" or getattr(node, "args", None):
            continue
        element = receiver(node)
        if (
            isinstance(element, ast.Subscript)
            and isinstance(element.slice, ast.Name)
            and isinstance(element.value, ast.Name)
            and element.slice.id == loop.target.id
            and LISTS.search(element.value.id) is None
            and not _is_other(program, element.value)
            and not _changes(program, loop, element.value.id)
        ):
            return True
    return False


def _is_other(program: ParsedProgram, name: ast.Name) -> bool:
    """Whether a variable is a list, or an array of numpy, whose elements cost less to read."""
    for value in program.values(name):
        if isinstance(value, ast.List | ast.ListComp | ast.Tuple) or method(value) == "numpy":
            return True
        if program.called(value).startswith(("numpy.", "pandas.")):
            return True
    return False


def _is_short(program: ParsedProgram, loop: ast.For) -> bool:
    """Whether a loop in no other one has few turns, as one that prints the five most likely classes."""
    last = program.value(loop.iter.args[-1]) if isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 1 else None
    is_few = isinstance(last, ast.Constant) and isinstance(last.value, int) and last.value <= FEW
    return is_few and nearest_loop(program, loop) is None


def _changes(program: ParsedProgram, loop: ast.For, name: str) -> bool:
    """Whether a loop makes or fills the tensor that it reads, so that there is no whole one before it."""
    for node in inside(program, loop):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == name:
            return True
    return False


def _nest(line: str, rows: str = "x.size(0)", columns: str = "x.size(1)") -> str:
    return f"def loss(x, y):\n    for i in range({rows}):@\n        for j in range({columns}):\n            {line}\n"


def _found(text: str) -> str:
    return text.replace("@", "  # <-")


def _plain(text: str) -> str:
    return text.replace("@", "")


RULE = Rule(
    id="tensor-element-loop",
    summary="A Python loop computes with the elements of a tensor one by one",
    why="Indexing a tensor makes a new tensor object and goes through torch's dispatcher: about a microsecond for "
    "each element on a CPU, and a launch or a wait for each on a GPU. One operation on the whole tensor takes "
    "nanoseconds for each element.",
    fix="Write it for whole tensors (broadcasting, masks, torch.where, gather, scatter_add); to read elements in "
    "Python, call x.tolist() once before the loop.",
    find=find,
    wrong=(
        _found(_nest("y[i, j] = x[i, j] * 2")),
        _found(_nest("y += abs(x[i][j])")),
        _found(_nest("y += x[i, j] if x[i, j] > 0 else 0")),
        _found("def f(n):\n    x = torch.zeros(n, n)\n")
        + _found(_nest("x[i, j] = i * j", "x.shape[0]", "x.shape[1]")).replace("def loss(x, y):\n", ""),
        "def accuracy(hits, labels, totals):\n    for i in range(len(labels)):  # <-\n"
        "        totals[int(labels[i])] += hits[i].item()\n",
        "for i in range(n):  # <-\n    print(names[i], scores[i].item())\n",
        "for x, y in loader:\n    hits = net(x) == y\n    for i in range(4):  # <-\n"
        "        total[y[i]] += hits[i].item()\n",
    ),
    right=(
        _plain(_nest("y[i, j] = x[i - 1, j] + 1")),
        _plain(_nest("y[i, j] = z[i, j]")),
        _plain(_nest("y += x[i].sum()")),
        "def loss(x):\n    for i in range(x.size(0)):\n        h = cell(x[i], h)\n",
        _plain(_nest("y[i, j] = x[i, j]", "x.shape[0]", "x.shape[1]")),
        "for i in range(n):\n    print(scores[k].item())\n",
        "for i, x in enumerate(loader):\n    total += loss.item()\n",
        "for i in range(n):\n    score = net(x[i])\n    print(score.item())\n",
        "for i in range(n):\n    scores[i] = net(x)\n    print(scores[i].item())\n",
        "for i in range(n):\n    axes[i].set_title(labels[i].item())\n",
        "for i in range(n):\n    row = rows[i].tolist()\n",
        "def test_all(x, y):\n    for i in range(3):\n        assert x[i].item() == y[i]\n",
        "values = scores.tolist()\nfor i in range(n):\n    print(values[i])\n",
        "for i in range(n):\n    losses[name][i].item()\n",
        "for i in range(5):\n    print(names[best[i]], scores[i].item())\n",
        "for i in range(len(losses)):\n    sums[i] += losses[i].item()\n",
        "import numpy as np\nhits = np.zeros(n)\nfor i in range(n):\n    print(hits[i].item())\n",
        "hits = net(x).cpu().numpy()\nfor i in range(n):\n    print(hits[i].item())\n",
        "parts = [net(x) for x in data]\nfor i in range(n):\n    print(parts[i].item())\n",
        "if args.debug:\n    for i in range(n):\n        print(scores[i].item())\n",
        "import time\nstart = time.time()\nfor i in range(x.size(0)):\n    for j in range(x.size(1)):\n"
        "        y[i, j] = x[i, j] * 2\n",
    ),
)
