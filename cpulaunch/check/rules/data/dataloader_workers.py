"""A DataLoader without workers that feeds a training loop."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import makes_batches_on_gpu, methods
from cpulaunch.check.source.flow import inside, iterated, training_loops
from cpulaunch.check.source.performance_visitor import synchronized_loaders
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_of_self, method, spread

IN_MEMORY = ("torch.utils.data.TensorDataset", "torch.utils.data.dataset.TensorDataset")
PARTS = tuple(f"torch.utils.data.{name}" for name in ("Subset", "ConcatDataset", "random_split", "dataset.Subset"))
"""Functions and classes that make a data set of the items of others."""
TENSORS = (
    *("torch.tensor", "torch.as_tensor", "torch.from_numpy", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor"),
    *("numpy.array", "numpy.asarray", "numpy.float32", "numpy.int64", "torch.unsqueeze", "torch.squeeze"),
)
CASTS = (
    *("float", "long", "int", "double", "bool", "to", "type", "astype", "item", "copy", "clone", "numpy", "to_numpy"),
    *("view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "flatten"),
)
"""What takes a microsecond for an item that is in memory."""
MAX_DEPTH = 4
INDICES = re.compile(r"(^|_)(idx|ids?|nids?|eids?|indices|index|indexes|perm|seeds)$", re.IGNORECASE)
"""Names of arrays of positions, whose loader draws batches of numbers."""
SELECTING = ("nonzero", "split", "view", "reshape", "to", "cuda", "numpy", "tolist", "randperm", "arange")
"""Functions and methods whose results are tensors and arrays."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DataLoaders that torchfix calls synchronized and that a training loop runs over, but for those of tensors."""
    used = [program.value(each) for loop in training_loops(program) for each in iterated(program, loop)]
    loaders = {
        whole: call
        for call in dict.fromkeys(used)
        if isinstance(call, ast.Call) and program.called(call) == "torch.utils.data.DataLoader"
        if (whole := spread(program, call)) is not None
    }
    for whole in synchronized_loaders([*loaders]) if loaders else ():
        if not (_is_in_memory(program, argument(whole, "dataset", 0)) or makes_batches_on_gpu(program, whole)):
            yield Hit(node=loaders[whole], seen="a training loop runs over a DataLoader with num_workers=0")


def _is_in_memory(program: ParsedProgram, data: ast.AST | None, depth: int = MAX_DEPTH) -> bool:
    """Whether items are only picked from memory: of a list, a TensorDataset, a part of one, a class that does so.

    A name whose value is not certain may be part of any data set that the program makes, or one that was loaded.
    """
    value = program.value(data)
    if any(INDICES.search(getattr(each, "id", getattr(each, "attr", ""))) for each in (data, value)):
        return True
    if isinstance(value, ast.Subscript):
        value = program.value(value.value)
    if isinstance(value, ast.Name | ast.Attribute):
        return _makes_tensor_datasets(program)
    if program.called(value) in IN_MEMORY or isinstance(value, ast.List | ast.ListComp | ast.Tuple):
        return True
    if not isinstance(value, ast.Call) or not depth:
        return False
    if method(value) in SELECTING or (isinstance(value.func, ast.Name) and value.func.id == "range"):
        return True
    if program.called(value) in PARTS:
        return bool(value.args) and _is_in_memory(program, value.args[0], depth - 1)
    made = program.value(value.func)
    if isinstance(made, ast.FunctionDef):
        results = [node.value for node in inside(program, made) if isinstance(node, ast.Return)]
        returned = [program.values(each) for each in results if each is not None]
        return any(not values or any(program.called(each) in IN_MEMORY for each in values) for values in returned)
    return isinstance(made, ast.ClassDef) and _only_picks(program, made, value)


@lru_cache(maxsize=2)
def _makes_tensor_datasets(program: ParsedProgram) -> bool:
    return any(program.called(call) in IN_MEMORY for call in program.calls)


def _only_picks(program: ParsedProgram, owner: ast.ClassDef, made: ast.Call) -> bool:
    """Whether `__getitem__` only indexes what the object holds, and makes tensors of it."""
    getter = methods(owner).get("__getitem__")
    nodes = inside(program, getter) if getter else []
    is_straight = not any(isinstance(node, ast.For | ast.While | ast.With | ast.comprehension) for node in nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    are_small = all(_is_small(program, each) or _is_absent_or_small(program, each, owner, made) for each in calls)
    return bool(nodes) and is_straight and are_small and any(isinstance(node, ast.Subscript) for node in nodes)


def _is_small(program: ParsedProgram, call: ast.Call) -> bool:
    return program.called(call) in TENSORS or _is_cast(program, call)


def _is_absent_or_small(program: ParsedProgram, call: ast.Call, owner: ast.ClassDef, made: ast.Call) -> bool:
    """Whether a call is of `self.transform` or the like, and the data set is made without it, or with a small one."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) and is_of_self(call.func) else ""
    initializer = methods(owner).get("__init__")
    names = [each.arg for each in initializer.args.args[1:]] if initializer else []
    if initializer is None or name not in names or name in methods(owner):
        return False
    whole = spread(program, made)
    if whole is None:
        return True
    given = program.value(argument(whole, name, names.index(name)) or _default(initializer, name))
    if given is None or is_constant(given, None):
        return any(isinstance(each, ast.If | ast.IfExp) for each in program.around(call))
    inner = (node for node in ast.walk(given) if isinstance(node, ast.Call))
    return isinstance(given, ast.Lambda) and all(_is_small(program, each) for each in inner)


def _default(function: ast.FunctionDef, name: str) -> ast.expr | None:
    """What a parameter is if it is not given."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    defaults = function.args.defaults
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)).get(name)


def _is_cast(program: ParsedProgram, call: ast.Call) -> bool:
    is_number = isinstance(call.func, ast.Name) and call.func.id in ("int", "float", "len")
    return is_number or (method(call) in CASTS and not program.called(call))


LOOP = """
for x, y in {}:
    opt.zero_grad()
    loss_of(net(x), y).backward()
    opt.step()
"""

PICKING = """class Data(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __getitem__(self, index):
        return torch.tensor(self.x[index]), self.y[index]

"""

TRANSFORMING = """class Data(Dataset):
    def __init__(self, x, transform=None):
        self.x, self.transform = x, transform

    def __getitem__(self, index):
        x = self.x[index]
        if self.transform:
            x = self.transform(x)
        return x

"""

RULE = Rule(
    id="dataloader-workers",
    summary="A DataLoader without workers feeds a training loop",
    why="With num_workers=0 the training process reads and transforms each batch itself, between two steps. Worker "
    "processes prepare the next batches while a step computes. Found by torchfix (TOR401); cpulaunch reports it only "
    "where a training loop runs over the loader and its data set does more than pick items from memory, as "
    "TensorDatasets and lists do, which workers would slow down.",
    fix="Give num_workers, for example DataLoader(..., num_workers=4), or run the program with "
    "`cpulaunch --dataloader-workers auto`, which also gives the workers cores of their own.",
    find=find,
    wrong=(
        "loader = DataLoader(data, batch_size=32)  # <-" + LOOP.format("loader"),
        "loader = DataLoader(data, 32, num_workers=0)  # <-" + LOOP.format("loader"),
        "loader = DataLoader(data, 32, True)  # <-\nfor i, (x, y) in enumerate(loader):\n    net(x).backward()\n"
        "    opt.step()\n",
        "loader = torch.utils.data.DataLoader(data)  # <-" + LOOP.format("tqdm(loader)"),
        "loader = DataLoader(data)  # <-\nbar = tqdm.tqdm(enumerate(loader))" + LOOP.format("bar"),
        "loader = DataLoader(data)  # <-\nbatches = iter(loader)" + LOOP.format("batches"),
        "class Trainer:\n    def __init__(self, data):\n        self.loader = DataLoader(data)  # <-\n\n"
        "    def fit(self):\n        for x in self.loader:\n            self.net(x).sum().backward()\n"
        "            self.opt.step()\n",
        PICKING.replace("self.y[index]", "read(self.y[index])")
        + "loader = DataLoader(Data(x, y))  # <-"
        + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x, augment))  # <-" + LOOP.format("loader"),
        TRANSFORMING.replace("=None", "=augment") + "loader = DataLoader(Data(x))  # <-" + LOOP.format("loader"),
        TRANSFORMING
        + "options = dict(transform=augment)\nloader = DataLoader(Data(x, **options))  # <-"
        + LOOP.format("loader"),
        "options = {'batch_size': 32, 'shuffle': True}\nloader = DataLoader(data, **options)  # <-"
        + LOOP.format("loader"),
        "def read(path):\n    if path is None:\n        return\n    return open_data(path)\n\n"
        "loader = DataLoader(read('a'))  # <-" + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x, transform=lambda x: decode(x)))  # <-" + LOOP.format("loader"),
        "def main():\n    for x in DataLoader(open_data()):  # <-\n        net(x).backward()\n        opt.step()\n",
    ),
    right=(
        "loader = DataLoader(data, num_workers=4)" + LOOP.format("loader"),
        "loader = DataLoader(data, num_workers=args.workers)" + LOOP.format("loader"),
        "loader = DataLoader(data, **options)" + LOOP.format("loader"),
        "def fit(given):\n    for x in DataLoader(data, **given):\n        net(x).backward()\n        opt.step()\n\n"
        "options = {'batch_size': 32}\noptions['num_workers'] = 4\nfit(options)\n",
        "loader = DataLoader(data)\nfor x in loader:\n    net(x)\n",
        "loader = DataLoader(data)\n",
        "data = torch.utils.data.TensorDataset(a, b)\nloader = DataLoader(data)" + LOOP.format("loader"),
        "def read():\n    return torch.utils.data.TensorDataset(a, b)\n\nloader = DataLoader(read())"
        + LOOP.format("loader"),
        "def read(path):\n    loaded = torch.load(path)\n    one, data = loaded['a'], loaded['b']\n    return data\n\n"
        "loader = DataLoader(read('a.pt'))" + LOOP.format("loader"),
        "def read(more):\n    data = torch.utils.data.TensorDataset(a)\n    if more:\n"
        "        data = torch.utils.data.TensorDataset(a, b)\n    return data\n\nloader = DataLoader(read(True))"
        + LOOP.format("loader"),
        "import functools\n\ndef collate(batch, device):\n    return torch.stack(batch).to(device)\n\n"
        "loader = DataLoader(data, collate_fn=functools.partial(collate, device='cuda'))" + LOOP.format("loader"),
        "loader = DataLoader([(a, b), (c, d)])" + LOOP.format("loader"),
        "data = torch.utils.data.TensorDataset(a, b)\n"
        "first, second = torch.utils.data.random_split(data, [8, 2])\nloader = DataLoader(first)"
        + LOOP.format("loader"),
        "data = torch.utils.data.Subset(torch.utils.data.TensorDataset(a, b), range(9))\nloader = DataLoader(data)"
        + LOOP.format("loader"),
        PICKING + "loader = DataLoader(Data(x, y))" + LOOP.format("loader"),
        PICKING.replace("(Dataset)", "") + "loader = DataLoader(Data(x, y))" + LOOP.format("loader"),
        PICKING.replace("self.y[index]", "self.y[index].unsqueeze(0)")
        + "loader = DataLoader(Data(x, y))"
        + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x, lambda x: x.reshape(-1)))" + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x))" + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x, transform=None))" + LOOP.format("loader"),
        TRANSFORMING + "loader = DataLoader(Data(x, **options))" + LOOP.format("loader"),
        TRANSFORMING.replace("=None", "=lambda x: x.float()") + "loader = DataLoader(Data(x))" + LOOP.format("loader"),
        "options = {'batch_size': 32, 'num_workers': 4}\nloader = DataLoader(data, **options)" + LOOP.format("loader"),
        "options = {'batch_size': 32}\noptions['num_workers'] = 4\nloader = DataLoader(data, **options)"
        + LOOP.format("loader"),
        "options = {'batch_size': 32}\nadd_workers(to=options)\nloader = DataLoader(data, **options)"
        + LOOP.format("loader"),
        "options = {'batch_size': 32} if small else more\nloader = DataLoader(data, **options)" + LOOP.format("loader"),
        "def train(loader):\n    for x in loader:\n        net(x).backward()\n        opt.step()\n",
        "loader = DataLoader(data)\nloader = prepared(loader)" + LOOP.format("loader"),
        "from mine import DataLoader\nloader = DataLoader(data)" + LOOP.format("loader"),
        "loader = DataLoader(data)\nother = DataLoader(data, num_workers=2)" + LOOP.format("other"),
        "loader = DataLoader(data, *rest)" + LOOP.format("loader"),
        "loader = DataLoader(range(9))" + LOOP.format("loader"),
        "def main(train_idx):\n    loader = DataLoader(train_idx)"
        + LOOP.format("loader").replace("\n", "\n    ").rstrip(" "),
        "nodes = graph.mask.nonzero().view(-1)\nloader = DataLoader(nodes)" + LOOP.format("loader"),
        "loader = DataLoader(graph.train_idx)" + LOOP.format("loader"),
    ),
)
