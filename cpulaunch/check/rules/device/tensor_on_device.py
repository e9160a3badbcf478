"""Tensors that are made on the CPU and copied to the GPU at once."""

import ast
import re
from collections.abc import Iterable, Iterator

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.datasets import loops_around
from cpulaunch.check.source.flow import is_in_test, is_on_gpu, is_unconditional, iterated
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_open, method

EXACT = {f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "eye")}
RANDOM = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm")}
UNSAFE = "the GPU draws other random numbers from the same seed"
ONCE = ("__init__", "main", "setup", "build", "export")
BATCHES = re.compile(r"(loader|(\b|_)dl)$", re.IGNORECASE)
"""What a loop runs over in whose every turn there is another batch."""
PASSES = re.compile(r"load|epoch|batch|\bdl\b|steps|iters|data(set)?\b|modules\(|parameters\(", re.IGNORECASE)
"""Words of loops through data or a whole network: what is made before one of them is made once for many turns."""
SETS = re.compile(r"load|epoch|\bdl\b|data(set)?\b", re.IGNORECASE)
"""Those of them that may be long within one turn with a batch, as a validation is."""
FIXED = ("device", "generator", "requires_grad", "pin_memory", "out", "layout")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """`torch.zeros(...).cuda()` and the like in loops and functions; what is made once, at the top, costs little."""
    for call in program.calls:
        made = call.func.value if isinstance(call.func, ast.Attribute) else None
        name = program.called(made)
        if name not in EXACT | RANDOM or not isinstance(made, ast.Call) or is_open(made):
            continue
        device = "" if _is_empty(made) else _device(program, call)
        if device and not any(argument(made, each) for each in FIXED) and _is_repeated(program, call):
            edit = CallEdit(set={"device": device}, unwrap=True, unsafe=UNSAFE if name in RANDOM else "")
            yield Hit(node=call, seen=f"{name} fills a tensor on the CPU, which is then copied to the GPU", edit=edit)


def _is_empty(made: ast.Call) -> bool:
    """Whether a tensor has no elements, to have others appended to it."""
    sizes = [size for each in made.args for size in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])]
    return any(is_constant(size, 0) for size in sizes)


def _device(program: ParsedProgram, call: ast.Call) -> str:
    """The text of the CUDA device that a call moves to; empty if it does not, or not certainly."""
    if method(call) == "cuda" and not call.args and not call.keywords:
        return '"cuda"'
    if method(call) == "to" and len(call.args) == 1 and not call.keywords and is_on_gpu(program, call.args[0]):
        return program.source(call.args[0])
    return ""


def _is_repeated(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call runs often, as far as the file tells: in a loop, or whenever a function runs that others call."""
    if is_in_test(program, call) or _is_made_if_absent(program, call):
        return False
    function = program.function(call)
    loop = next(loops_around(program, call), None)
    if loop is not None and function in program.around(loop):
        words = SETS if _is_turn_of_batch(program, loop) else PASSES
        return not _goes_through_data(program.children[loop], words)
    if isinstance(function, ast.FunctionDef) and _is_before_pass(function):
        return False
    if loop is not None:
        return True
    if not isinstance(function, ast.FunctionDef) or function.name in ONCE or program.caller(function) is not None:
        return False
    given = [each for each in function.args.args if each.arg not in ("self", "cls")]
    return bool(given) and is_unconditional(program, call, function)


def _is_made_if_absent(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a tensor is made only where there is none yet, as `if queue is None` says."""
    inner: ast.AST = call
    for outer in program.around(call):
        if isinstance(outer, ast.If | ast.IfExp) and _asks_if_absent(outer, inner):
            return True
        inner = outer
    return False


def _asks_if_absent(branch: ast.If | ast.IfExp, within: ast.AST) -> bool:
    """Whether the part of a branch that a node is in runs where something is None."""
    is_else = within is branch.orelse or (isinstance(branch.orelse, list) and within in branch.orelse)
    wanted = ast.IsNot if is_else else ast.Is
    asked = (part for part in ast.walk(branch.test) if isinstance(part, ast.Compare))
    return any(isinstance(each.ops[0], wanted) and is_constant(each.comparators[0], None) for each in asked)


def _is_turn_of_batch(program: ParsedProgram, loop: ast.AST) -> bool:
    """Whether each turn of a loop is a step with a batch, in which loops over steps and parameters are short."""
    return any(BATCHES.search(ast.unparse(each)) for each in iterated(program, loop))


def _is_before_pass(function: ast.FunctionDef) -> bool:
    """Whether a function goes through data in a loop, or is given a loader to do so."""
    if any(PASSES.search(each.arg) for each in function.args.args):
        return True
    return _goes_through_data([function])


def _goes_through_data(parts: Iterable[ast.AST], words: re.Pattern[str] = PASSES) -> bool:
    """Whether there is a loop through data, or through all modules of a network, in one of these parts."""
    loops = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.For | ast.While))
    return any(words.search(ast.unparse(each.iter if isinstance(each, ast.For) else each.test)) for each in loops)


def _function(text: str) -> str:
    return f"def noise(n):\n    return {text}\n"


RULE = Rule(
    id="tensor-on-device",
    summary="A tensor is made on the CPU and copied to the GPU",
    why="The CPU allocates and fills the tensor, and the copy makes the program wait. With device= the GPU fills it.",
    fix="Give the device to the function: torch.zeros(n, device=device). Random tensors then come from the GPU's "
    "generator, with other numbers, so --fix changes them with --unsafe-fixes only.",
    find=find,
    wrong=(
        _function("torch.zeros(n).cuda()  # <-"),
        _function("torch.randn(n, 3).to('cuda')  # <-"),
        _function("torch.ones((n, 3), dtype=torch.float16).to('cuda:0')  # <-"),
        "device = torch.device('cuda')\n" + _function("torch.full((n,), 1.0).to(device)  # <-"),
        "for i in range(9):\n    x = torch.eye(i).cuda()  # <-\n",
        _function("torch.zeros(n).cuda()  # <-") + "\nfor i in range(9):\n    noise(i)\n",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n" + _function("torch.rand(n).to(device)  # <-"),
        "for x in loader:\n    if x is None:\n        break\n    else:\n        y = torch.zeros(9).cuda()  # <-\n",
        "for i, x in enumerate(train_loader):\n    state = torch.zeros(9).cuda()  # <-\n    for t in range(steps):\n"
        "        state = cell(x[t], state)\n",
    ),
    right=(
        _function("torch.zeros(n, device='cuda')"),
        _function("torch.zeros(n).to(device)"),
        _function("torch.zeros(n).to(torch.float16)"),
        _function("torch.zeros(n, generator=g).cuda()"),
        _function("torch.tensor(n).cuda()"),
        _function("torch.from_numpy(n).cuda()"),
        _function("torch.zeros(n).to('cpu')"),
        _function("torch.zeros(n).cuda(non_blocking=True)"),
        "x = torch.zeros(3).cuda()\n",
        _function("torch.zeros(n).cuda()") + "\nnoise(3)\n",
        _function("torch.zeros(n).cuda()") + "\nfor row in noise(3):\n    print(row)\n",
        "def forward(self, x):\n    if self.pool is None:\n        self.pool = torch.zeros(3).cuda()\n",
        "def compare():\n    return torch.zeros(3).cuda()\n",
        "def test_x():\n    assert torch.zeros(3).cuda().sum() == 0\n",
        _function("torch.zeros(n, **options).cuda()"),
        "class Net:\n    def __init__(self):\n        self.x = torch.zeros(3).cuda()\n",
        "class Solver:\n    def train_all(self):\n        self.x = torch.zeros(3).cuda()\n",
        _function("torch.zeros(0).cuda()"),
        "for epoch in range(9):\n    scores = torch.empty(0, 2).cuda()\n    for x in data:\n        pass\n",
        "for epoch in range(9):\n    total = torch.zeros(1).cuda()\n    for x in loader:\n        total += step(x)\n",
        "def fit(net, loader):\n    sums = torch.zeros(9).cuda()\n    for x in loader:\n        sums += net(x)\n"
        "\nfor epoch in range(9):\n    fit(net, loader)\n",
        "for epoch in range(9):\n    if epoch > 3 and queue is None:\n        queue = torch.zeros(9).cuda()\n"
        "    queue = train(queue)\n",
        "for x in data:\n    if pool is not None:\n        use(pool)\n"
        "    else:\n        pool = torch.zeros(9).cuda()\n",
        "for x in data:\n    pool = torch.zeros(9).cuda() if pool is None else pool\n",
        "for i, x in enumerate(loader):\n    if i % 100 == 0:\n        hits = torch.zeros(1).cuda()\n"
        "        for y in other_loader:\n            hits += score(y)\n",
        "for loader in (first_loader, second_loader):\n    total = torch.zeros(1).cuda()\n    for x in loader:\n"
        "        total += step(x)\n",
        "def prune(net, n):\n    weights = torch.zeros(n).cuda()\n    for name, part in net.named_modules():\n"
        "        weights += part.weight\n",
        "class Score:\n    def __call__(self, net, dl):\n        hist = torch.zeros(9, 9).cuda()\n"
        "        for x in enumerate(dl):\n            hist += net(x)\n",
        "def score(net, loader):\n    hist = torch.zeros(9, 9).cuda()\n    for x in loader:\n        hist += net(x)\n",
    ),
)
