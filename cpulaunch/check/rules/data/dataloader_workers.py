"""A DataLoader without workers that feeds a training loop."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, iterated, training_loops
from cpulaunch.check.source.performance_visitor import torchfix_places
from cpulaunch.check.source.program import ParsedProgram, argument, is_open

IN_MEMORY = ("torch.utils.data.TensorDataset",)


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DataLoaders that torchfix calls synchronized and that a training loop runs over, but for those of tensors."""
    used = [program.value(each) for loop in training_loops(program) for each in iterated(loop)]
    loaders = [each for each in used if program.called(each) == "torch.utils.data.DataLoader"]
    places = torchfix_places(program.text, "TOR401") if loaders else frozenset()
    for call in loaders:
        if not isinstance(call, ast.Call) or (call.lineno, call.col_offset) not in places or is_open(call):
            continue
        if not _is_in_memory(program, argument(call, "dataset", 0)):
            yield Hit(node=call, seen="a training loop runs over a DataLoader with num_workers=0")


def _is_in_memory(program: ParsedProgram, data: ast.AST | None) -> bool:
    """Whether a data set is a list or a TensorDataset, or a function of this file returns one."""
    value = program.value(data)
    if program.called(value) in IN_MEMORY or isinstance(value, ast.List | ast.ListComp | ast.Tuple):
        return True
    function = program.value(value.func) if isinstance(value, ast.Call) else None
    if not isinstance(function, ast.FunctionDef):
        return False
    returned = [node.value for node in inside(program, function) if isinstance(node, ast.Return)]
    return any(program.called(program.value(each)) in IN_MEMORY for each in returned)


LOOP = """
for x, y in {}:
    opt.zero_grad()
    loss_of(net(x), y).backward()
    opt.step()
"""

RULE = Rule(
    id="dataloader-workers",
    summary="A DataLoader without workers feeds a training loop",
    why="With num_workers=0 the training process reads and transforms each batch itself, between two steps. Worker "
    "processes prepare the next batches while a step computes. Found by torchfix (TOR401); cpulaunch reports it only "
    "where a training loop runs over the loader and its data set is not a TensorDataset or a list, which workers would "
    "slow down.",
    fix="Give num_workers, for example DataLoader(..., num_workers=4), or run the program with "
    "`cpulaunch --dataloader-workers auto`, which also gives the workers cores of their own.",
    find=find,
    wrong=(
        "loader = DataLoader(data, batch_size=32)  # <-" + LOOP.format("loader"),
        "loader = DataLoader(data, 32, num_workers=0)  # <-" + LOOP.format("loader"),
        "loader = DataLoader(data, 32, True)  # <-\nfor i, (x, y) in enumerate(loader):\n    net(x).backward()\n"
        "    opt.step()\n",
        "loader = torch.utils.data.DataLoader(data)  # <-" + LOOP.format("tqdm(loader)"),
        "class Trainer:\n    def __init__(self, data):\n        self.loader = DataLoader(data)  # <-\n\n"
        "    def fit(self):\n        for x in self.loader:\n            self.net(x).sum().backward()\n"
        "            self.opt.step()\n",
        "def main():\n    for x in DataLoader(open_data()):  # <-\n        net(x).backward()\n        opt.step()\n",
    ),
    right=(
        "loader = DataLoader(data, num_workers=4)" + LOOP.format("loader"),
        "loader = DataLoader(data, num_workers=args.workers)" + LOOP.format("loader"),
        "loader = DataLoader(data, **options)" + LOOP.format("loader"),
        "loader = DataLoader(data)\nfor x in loader:\n    net(x)\n",
        "loader = DataLoader(data)\n",
        "data = torch.utils.data.TensorDataset(a, b)\nloader = DataLoader(data)" + LOOP.format("loader"),
        "def read():\n    return torch.utils.data.TensorDataset(a, b)\n\nloader = DataLoader(read())"
        + LOOP.format("loader"),
        "loader = DataLoader([(a, b), (c, d)])" + LOOP.format("loader"),
        "def train(loader):\n    for x in loader:\n        net(x).backward()\n        opt.step()\n",
        "loader = DataLoader(data)\nloader = prepared(loader)" + LOOP.format("loader"),
        "from mine import DataLoader\nloader = DataLoader(data)" + LOOP.format("loader"),
        "loader = DataLoader(data)\nother = DataLoader(data, num_workers=2)" + LOOP.format("other"),
        "loader = DataLoader(data, *rest)" + LOOP.format("loader"),
    ),
)
