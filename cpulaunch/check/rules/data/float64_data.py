"""Data that a program keeps in double precision and computes with in single."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes, methods
from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_of_self, method, receiver

DOUBLE = ("numpy.float64", "numpy.double", "torch.float64", "torch.double")
MADE = {"numpy.zeros": 1, "numpy.ones": 1, "numpy.loadtxt": 1, "numpy.genfromtxt": 1, "numpy.linspace": 5}
"""Functions of numpy whose result is float64 unless a dtype is given -> the place of that argument."""
DRAWN = {f"numpy.random.{name}" for name in ("randn", "rand", "random", "normal", "uniform", "standard_normal")}
"""Functions that draw numbers in double precision only."""
JOINED = ("numpy.concatenate", "numpy.vstack", "numpy.hstack", "numpy.stack")
KEEPING = ("reshape", "copy", "transpose", "squeeze", "flatten", "ravel")
DEPTH = 3
"""Variables that are followed from what __getitem__ converts to what it reads."""
SINGLE = ("torch.float32", "torch.float", "numpy.float32")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Attributes of a data set stored as float64 which `__getitem__` converts to float32."""
    for owner in dataset_classes(program):
        by_name = methods(owner)
        getter = by_name.get("__getitem__")
        converted = set(_converted(program, getter)) if getter else set()
        nodes = [node for each in by_name.values() if each is not getter for node in inside(program, each)]
        for name in sorted(converted):
            stored = [
                node.value
                for node in nodes
                if isinstance(node, ast.Assign)
                and name in map(_name, node.targets)
                and not is_constant(node.value, None)
            ]
            if stored and all(_is_double(program, each) for each in stored):
                yield Hit(node=stored[-1], seen="kept as float64, and converted to float32 for every item")


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) and is_of_self(node) else ""


def _converted(program: ParsedProgram, getter: ast.FunctionDef) -> Iterator[str]:
    """The attributes of self whose items a method converts to single precision."""
    for node in inside(program, getter):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(word.value for word in node.keywords)]
        is_single = any(program.dotted(each) in SINGLE or is_constant(each, "float32") for each in given)
        if method(node) == "float" or is_single or program.called(node) == "torch.FloatTensor":
            yield from _read(program, node)


def _read(program: ParsedProgram, node: ast.AST, depth: int = DEPTH) -> Iterator[str]:
    """The attributes of self that an expression reads items of, itself or by way of variables."""
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and _name(_indexed(each)):
            yield _name(_indexed(each))
        elif isinstance(each, ast.Name) and depth:
            value = program.value(each)
            if value is not None and value is not each and isinstance(value, ast.expr):
                yield from _read(program, value, depth - 1)


def _indexed(node: ast.Subscript) -> ast.expr:
    """What an item is read of: rows of a slice are items of the whole."""
    value = node.value
    while isinstance(value, ast.Subscript):
        value = value.value
    return value


def _is_double(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a value is certainly float64: converted to it, or made so by numpy's default."""
    value = program.value(node)
    if not isinstance(value, ast.Call):
        return False
    if method(value) == "double" and not value.args:
        return True
    if method(value) in ("astype", "to", "type") and value.args:
        return _is_double_type(program, value.args[0])
    kind = argument(value, "dtype")
    if program.called(value) in ("numpy.array", "numpy.asarray", "torch.tensor", "torch.as_tensor", "torch.from_numpy"):
        if kind is not None:
            return _is_double_type(program, kind)
        return bool(value.args) and _is_double(program, value.args[0])
    if program.called(value) in MADE:
        place = MADE[program.called(value)]
        kind = kind or argument(value, "dtype", place)
        return kind is None or _is_double_type(program, kind)
    if program.called(value) in DRAWN:
        return True
    if program.called(value) in JOINED and kind is None:
        return any(_is_double(program, each) for each in _joined(value))
    return method(value) in KEEPING and _is_double(program, receiver(value) or value)


def _joined(call: ast.Call) -> list[ast.expr]:
    """The arrays that a call joins: one of double precision makes the result double, too."""
    first = call.args[0] if call.args else None
    return first.elts if isinstance(first, ast.List | ast.Tuple) else []


def _is_double_type(program: ParsedProgram, node: ast.AST) -> bool:
    return program.dotted(node) in DOUBLE or is_constant(node, "float64", "double", "float") or _is_builtin(node)


def _is_builtin(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "float"


DATA = """import numpy as np

class Data(Dataset):
    def __init__(self, path):
        {}

    def __getitem__(self, index):
        return {}
"""
SINGLE_ITEM = "torch.tensor(self.x[index], dtype=torch.float32)"

RULE = Rule(
    id="float64-data",
    summary="A data set keeps float64 and converts every item to float32",
    why="float64 takes twice the memory of float32, in every worker, and the conversion runs again for each item of "
    "each epoch. Text files that numpy reads, and its zeros and ones, are float64 unless a dtype is given.",
    fix="Convert once, where the data are read: np.loadtxt(path, dtype=np.float32).",
    find=find,
    is_default=False,
    wrong=(
        DATA.format("self.x = np.loadtxt(path)  # <-", SINGLE_ITEM),
        DATA.format("self.x = np.load(path).astype(np.float64)  # <-", "torch.from_numpy(self.x[index]).float()"),
        DATA.format("self.x = torch.load(path).double()  # <-", "self.x[index].float()"),
        DATA.format("self.x = np.array(read(path), dtype=float)  # <-", "torch.FloatTensor(self.x[index])"),
        DATA.format("self.x = np.genfromtxt(path, delimiter=',')  # <-", "self.x[index].astype('float32')"),
        DATA.format("self.x = torch.from_numpy(np.zeros((9, 9)))  # <-", "self.x[index].to(torch.float32)"),
        DATA.format("self.x = np.random.rand(9, 9)  # <-", "torch.from_numpy(self.x[index][1:]).float()"),
        DATA.format("self.x = np.loadtxt(path)  # <-", "torch.from_numpy(row).float()").replace(
            "        return", "        row = self.x[index, 1:]\n        return"
        ),
        DATA.format("self.x = np.concatenate([np.loadtxt(path), more])  # <-", "self.x[index].astype(np.float32)"),
    ),
    right=(
        DATA.format("self.x = np.loadtxt(path, dtype=np.float32)", SINGLE_ITEM),
        DATA.format("self.x = np.load(path)", SINGLE_ITEM),
        DATA.format("self.x = np.loadtxt(path)", "self.x[index]"),
        DATA.format("self.x = np.load(path).astype(np.float32)", SINGLE_ITEM),
        DATA.format("self.y = np.loadtxt(path)", SINGLE_ITEM),
        DATA.format("self.x = np.loadtxt(path)", SINGLE_ITEM).replace("(Dataset)", "(object)"),
        DATA.format("self.x = torch.load(path)", "self.x[index].float()"),
        DATA.format("self.x = np.array(read(path), dtype='uint8')", SINGLE_ITEM),
        DATA.format("self.x = np.array(read(path), dtype=kind)", SINGLE_ITEM),
        DATA.format("self.x = np.zeros((9, 9), np.float32)", SINGLE_ITEM),
        DATA.format("self.x = np.concatenate(parts)", SINGLE_ITEM),
        DATA.format("self.x = np.loadtxt(path)\n        self.x = scaled(self.x)", SINGLE_ITEM),
        DATA.format("self.x = np.loadtxt(path)", "torch.from_numpy(row).float()").replace(
            "        return", "        row = self.y[index]\n        return"
        ),
        DATA.format("self.x = np.loadtxt(path)", "torch.tensor(self.x[index], dtype=torch.float64)"),
        "import numpy as np\nx = np.loadtxt('x.txt')\ny = torch.tensor(x[0], dtype=torch.float32)\n",
    ),
)
