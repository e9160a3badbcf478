"""Images that a data set keeps as floats although they were bytes."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes, methods
from cpulaunch.check.source.flow import inside, is_in_test
from cpulaunch.check.source.program import ParsedProgram, is_constant, is_of_self, method

STORES = ("torch.utils.data.TensorDataset", "torch.utils.data.dataset.TensorDataset")
DEPTH = 6
REDUCTIONS = ("mean", "std", "var", "sum", "max", "min", "argmax", "argmin", "median", "amax", "amin", "norm")
"""Functions and methods whose results are far smaller than what they are given."""
BYTES = ("uint8", "int8", "bool")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Divisions by 255 of whole arrays that a data set keeps: in a TensorDataset, or in an attribute it indexes."""
    for call in program.calls:
        if program.called(call) in STORES and not is_in_test(program, call):
            for each in call.args:
                yield from _hits(program, each)
    for owner in dataset_classes(program):
        by_name = methods(owner)
        getter = by_name.get("__getitem__")
        indexed = {_indexed(node) for node in inside(program, getter)} - {""} if getter else set()
        for function in by_name.values():
            for node in inside(program, function) if function is not getter else ():
                is_kept = isinstance(node, ast.Assign) and any(_name(target) in indexed for target in node.targets)
                if is_kept and isinstance(node, ast.Assign) and not _is_guarded(program, node):
                    yield from _hits(program, node.value)


def _is_guarded(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a statement runs only if the values are large: then they may have been floats before."""
    tests = [each.test for each in program.around(node) if isinstance(each, ast.If)]
    return any(isinstance(part, ast.Attribute) and part.attr == "max" for test in tests for part in ast.walk(test))


def _indexed(node: ast.AST) -> str:
    """The attribute of self that an expression reads an item of."""
    return _name(node.value) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) else ""


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) and is_of_self(node) else ""


def _hits(program: ParsedProgram, node: ast.AST, depth: int = DEPTH) -> Iterator[Hit]:
    """The divisions by 255 that a value is made by, through calls and assignments."""
    value = program.value(node)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and is_constant(value.right, 255, 255.0):
        yield Hit(
            node=value, seen="a whole data set is kept as floats, four or eight bytes for each byte of the images"
        )
    elif isinstance(value, ast.Call) and depth and not _keeps_no_floats(program, value):
        inputs = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else ())]
        for each in inputs:
            yield from _hits(program, each, depth - 1)
    elif isinstance(value, ast.BinOp) and depth:
        yield from _hits(program, value.left, depth - 1)


def _keeps_no_floats(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call returns a few numbers, or bytes again."""
    if (program.called(call).rpartition(".")[2] or method(call)) in REDUCTIONS:
        return True
    given = (*call.args, *(word.value for word in call.keywords))
    names = (each.attr if isinstance(each, ast.Attribute) else getattr(each, "value", "") for each in given)
    return method(call) in ("byte", "bool") or any(name in BYTES for name in names)


NP = "import numpy as np\nfrom torch.utils.data import TensorDataset\n"
DATA = """class Data(Dataset):
    def __init__(self, path):
        {}

    def __getitem__(self, index):
        return self.x[index]
"""

RULE = Rule(
    id="float-images",
    summary="A data set keeps images as floats",
    why="Images are bytes. Divided by 255 they take four times as much memory as float32, and eight times as float64 "
    "(numpy's default): in every worker, in the cache and on the way to the device.",
    fix="Keep uint8, and convert each batch: x.to(device).float().div_(255).",
    find=find,
    wrong=(
        NP + "data = TensorDataset(torch.tensor(x / 255.0), y)  # <-\n",
        NP + "x = np.load('x.npy') / 255  # <-\ndata = TensorDataset(torch.from_numpy(x).float(), y)\n",
        DATA.format("self.x = np.load(path) / 255.0  # <-"),
        DATA.format("self.x = torch.from_numpy(np.load(path).astype('float32') / 255.)  # <-"),
        DATA.format("images = read(path) / 255  # <-\n        self.x = torch.tensor(images).permute(0, 3, 1, 2)"),
        NP + "x = torch.load('x.pt').float() / 255  # <-\nx = TensorDataset(x)\n".replace("x = Ten", "data = Ten"),
        DATA.format("self.x = (np.load(path) / 255 - 0.5) / 0.5  # <-"),
    ),
    right=(
        NP + "data = TensorDataset(torch.from_numpy(np.load('x.npy')), y)\n",
        NP + "x = x / 255\nif small:\n    x = y\ndata = TensorDataset(x)\n",
        NP + "data = TensorDataset(x / 100)\n",
        DATA.format("self.x = np.load(path)"),
        DATA.format("self.x = np.load(path)").replace("[index]", "[index] / 255.0"),
        DATA.format("self.x = (np.load(path) / 255).astype(np.uint8)"),
        DATA.format("self.x = np.argmax(np.load(path) / 255, axis=-1)"),
        DATA.format("self.mean = np.load(path).mean() / 255\n        self.x = np.load(path)"),
        DATA.format("self.x = np.load(path) / 255").replace("(Dataset)", "(object)"),
        DATA.format("self.x = np.load(path)\n        if self.x.max() > 1:\n            self.x = self.x / 255"),
        "x = np.load('x.npy') / 255\nnet(x)\n",
        NP + "def test_x():\n    return TensorDataset(x / 255)\n",
        "from mine import TensorDataset\ndata = TensorDataset(x / 255)\n",
        NP + "data = TensorDataset(x.float() / scale)\n",
        NP + "def prepare(x):\n    return x / 255\n",
    ),
)
