"""A data set that reads one and the same file again for every item."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram, is_of_self

READERS = (
    *("pandas.read_csv", "pandas.read_parquet", "pandas.read_json", "pandas.read_pickle", "numpy.load"),
    *("numpy.loadtxt", "numpy.genfromtxt", "torch.load", "h5py.File"),
)
BASES = ("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Readers in `__getitem__` whose file is an attribute of self or a constant: the same for every index."""
    for owner in (node for node in program.nodes if isinstance(node, ast.ClassDef)):
        if not any(program.dotted(base) in BASES for base in owner.bases):
            continue
        for function in owner.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__getitem__":
                yield from _in_method(program, function)


def _in_method(program: ParsedProgram, function: ast.FunctionDef) -> Iterator[Hit]:
    for node in inside(program, function):
        if not isinstance(node, ast.Call) or program.called(node) not in READERS or not node.args:
            continue
        file = node.args[0]
        is_same = isinstance(file, ast.Constant) or (is_of_self(file) and not _is_set(program, function, file))
        is_mapped = any(word.arg in ("mmap_mode", "mmap") for word in node.keywords)
        is_guarded = any(isinstance(each, ast.If) for each in program.around(node))
        if is_same and not is_mapped and not is_guarded:
            done = "opens" if program.called(node) == "h5py.File" else "reads"
            yield Hit(node=node, seen=f"__getitem__ {done} {ast.unparse(node.args[0])} again for every item")


def _is_set(program: ParsedProgram, function: ast.FunctionDef, file: ast.AST) -> bool:
    """Whether a method gives the attribute a value, which then may depend on the index."""
    stores = (node for node in inside(program, function) if isinstance(node, ast.Attribute))
    return any(isinstance(node.ctx, ast.Store) and ast.unparse(node) == ast.unparse(file) for node in stores)


def _dataset(line: str, base: str = "Dataset") -> str:
    head = "import numpy as np\nimport pandas as pd\nimport h5py\n\n"
    return f"{head}class Data({base}):\n    def __getitem__(self, index):\n        {line}\n        return data[index]\n"


RULE = Rule(
    id="whole-file-per-item",
    summary="A data set reads the same file again for every item",
    why="__getitem__ runs once for each sample of each epoch. A reader whose file does not depend on the index reads "
    "and parses the whole file, or opens it, every time.",
    fix="Read the file once, in __init__ or on first use, or map it: np.load(path, mmap_mode='r').",
    find=find,
    wrong=(
        _dataset("data = pd.read_csv(self.path)  # <-"),
        _dataset("data = np.load(self.path)  # <-"),
        _dataset("data = torch.load('all.pt')  # <-"),
        _dataset("data = h5py.File(self.path, 'r')['x']  # <-"),
        _dataset("data = np.loadtxt(self.path, delimiter=',')  # <-", base="torch.utils.data.Dataset"),
    ),
    right=(
        _dataset("data = np.load(self.paths[index])"),
        _dataset("data = np.load(self.path, mmap_mode='r')"),
        _dataset("data = torch.load('all.pt', mmap=True)"),
        _dataset("self.path = self.paths[index]\n        data = np.load(self.path)"),
        _dataset("data = self.data"),
        _dataset("data = pd.read_csv(self.path)", base="object"),
        _dataset("if self.data is None:\n            self.data = np.load(self.path)\n        data = self.data"),
        _dataset("data = torch.load(self.path_of(index))"),
        _dataset("data = torch.load(f'{self.root}/{index}.pt')"),
        _dataset("data = self.reader.read_csv(self.path)"),
        "import numpy as np\nclass Data(Dataset):\n    def __init__(self):\n        self.data = np.load(self.path)\n",
        _dataset("path = self.root / str(index)\n        data = np.load(path)"),
        _dataset("with open(self.path) as data:\n            pass"),
    ),
)
