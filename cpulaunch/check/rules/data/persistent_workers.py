"""Workers of a DataLoader that are started again in every epoch."""

import ast
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import CallEdit, Hit, Rule
from cpulaunch.check.source.datasets import loaders, loops_around, passes_over
from cpulaunch.check.source.flow import inside, is_in_test, is_off
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_open

UNSAFE = "the workers' random numbers, and the order of the samples, are other ones from the second epoch on"


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DataLoaders with workers that a loop runs over again and again, and that are made outside of it."""
    for call in loaders(program):
        workers = program.value(argument(call, "num_workers", 5))
        count = workers.value if isinstance(workers, ast.Constant) and isinstance(workers.value, int) else 0
        if count < 1 or is_open(call) or not is_off(argument(call, "persistent_workers")) or is_in_test(program, call):
            continue
        repeating = [next(loops_around(program, each), None) for each in passes_over(program, call)]
        if any(each is not None and _runs_often(program, call, each) for each in repeating):
            edit = CallEdit(set={"persistent_workers": "True"}, unsafe=UNSAFE)
            yield Hit(node=call, seen=f"{count} workers are started again in every epoch", edit=edit)


def _runs_often(program: ParsedProgram, loader: ast.Call, loop: ast.AST) -> bool:
    """Whether a loop makes the same loader run again, and does not change its data set in between."""
    turns = loop.iter if isinstance(loop, ast.For) else None
    is_once = program.called(turns) == "" and isinstance(turns, ast.Call) and _is_range_of_one(program, turns)
    if is_once or loop in loops_around(program, loader):
        return False
    data = argument(loader, "dataset", 0)
    name = ast.unparse(data) if isinstance(data, ast.Name | ast.Attribute) else ""
    is_used = any(name and _is_of(program, node, name) for node in inside(program, loop))
    return not is_used and not _changes_data(program)


def _is_of(program: ParsedProgram, node: ast.AST, name: str) -> bool:
    """Whether a node is the data set of a name, used for more than its length."""
    is_data = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name
    return is_data and not _is_length(program.parents[node])


def _is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


@lru_cache(maxsize=2)
def _changes_data(program: ParsedProgram) -> bool:
    return any(_changes_data_of_loader(program, node) for node in program.nodes)


def _changes_data_of_loader(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node is `loader.dataset.method(...)`, or sets an attribute of `loader.dataset`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute) or node.value.attr != "dataset":
        return False
    parent = program.parents[node]
    return isinstance(node.ctx, ast.Store) or (isinstance(parent, ast.Call) and parent.func is node)


def _is_range_of_one(program: ParsedProgram, turns: ast.Call) -> bool:
    is_range = isinstance(turns.func, ast.Name) and turns.func.id == "range"
    return is_range and len(turns.args) == 1 and is_constant(program.value(turns.args[0]), 0, 1)


EPOCHS = """
for epoch in range(10):
    for x, y in {}:
        train(x, y)
"""

RULE = Rule(
    id="persistent-workers",
    summary="A DataLoader starts its workers again in every epoch",
    why="Without persistent_workers, the workers end with each pass over the loader and the next pass starts new "
    "ones: new processes, imports, copies of the data set and an empty queue of batches at the start of every "
    "epoch.",
    fix="Give persistent_workers=True. The workers' random numbers and the order of the samples are then other ones "
    "from the second epoch on, so --fix changes it with --unsafe-fixes only; leave it if the data set is changed "
    "between epochs.",
    find=find,
    wrong=(
        "def epoch():\n    for x in loader:\n        step(x)\n\nloader = DataLoader(data, num_workers=4)  # <-\n"
        "for each in (epoch() for _ in range(10)):\n    print(each)\n",
        "loader = DataLoader(data, num_workers=4)  # <-" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=2, persistent_workers=False)  # <-" + EPOCHS.format("tqdm(loader)"),
        "WORKERS = 8\nloader = DataLoader(data, 32, num_workers=WORKERS)  # <-" + EPOCHS.format("loader"),
        "def train(loader):\n    for x in loader:\n        step(x)\n\nloader = DataLoader(data, num_workers=4)  # <-\n"
        "for epoch in range(epochs):\n    train(loader)\n",
        "loader = DataLoader(data, num_workers=4)  # <-"
        + EPOCHS.format("loader")
        + "    print(total / len(data), total / len(loader.dataset))\n",
        "def main():\n    loader = DataLoader(data, num_workers=1)  # <-\n    epoch = 0\n    while epoch < 9:\n"
        "        for i, x in enumerate(loader):\n            step(x)\n        epoch += 1\n",
        "loader = DataLoader(data, num_workers=4)  # <-\n"
        "for epoch in range(9):\n    bar = tqdm(loader)\n    for x in bar:\n        step(x)\n",
        "loader = DataLoader(data, num_workers=4)  # <-\n"
        "for epoch in range(9):\n    batches = enumerate(loader)\n    for i, x in tqdm(batches):\n        step(x)\n",
        "class Trainer:\n    def __init__(self, data):\n        self.loader = DataLoader(data, num_workers=4)  # <-\n\n"
        "    def fit(self):\n        while self.epoch < 3:\n            for x in self.loader:\n"
        "                step(x)\n",
    ),
    right=(
        "def batches():\n    for x in loader:\n        yield x\n\nloader = DataLoader(data, num_workers=4)\n"
        "for out in (net(x) for x in batches()):\n    print(out)\n",
        "loader = DataLoader(data, num_workers=4)\nfor epoch in range(9):\n    pass\nelse:\n    for x in loader:\n"
        "        step(x)\n",
        "loader = DataLoader(data, num_workers=4, persistent_workers=True)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=0)" + EPOCHS.format("loader"),
        "loader = DataLoader(data)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=args.workers)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=4, persistent_workers=keep)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=4, **options)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=4)\nfor x in loader:\n    step(x)\n",
        "def moved(loader):\n    for x in loader:\n        yield x.cuda()\n\n"
        "loader = DataLoader(data, num_workers=4)\nfor x in moved(loader):\n    step(x)\n",
        "loader = DataLoader(data, num_workers=4)" + EPOCHS.format("loader").replace("10", "1"),
        "loader = DataLoader(data, num_workers=4)\nbatches = iter(loader)" + EPOCHS.format("batches"),
        "loader = DataLoader(data, num_workers=4)\nbatches = enumerate(loader)" + EPOCHS.format("batches"),
        "loader = DataLoader(data, num_workers=4)\nbatches = zip(loader, names)" + EPOCHS.format("tqdm(batches)"),
        "for epoch in range(9):\n    loader = DataLoader(data, num_workers=4)\n    for x in loader:\n        step(x)\n",
        "loader = DataLoader(data, num_workers=4)"
        + EPOCHS.format("loader").replace("    for x", "    data.set_epoch(epoch)\n    for x"),
        "loader = DataLoader(data, num_workers=4)"
        + EPOCHS.format("loader").replace("    for x", "    loader.dataset.draw_negatives()\n    for x"),
        "loader = DataLoader(data, num_workers=4)"
        + EPOCHS.format("loader").replace("    for x", "    data.epoch = epoch\n    for x"),
        "class Trainer:\n    def __init__(self):\n        self.loader = DataLoader(self.data, num_workers=4)\n\n"
        "    def fit(self):\n        while self.epoch < 3:\n            self.data.shuffle()\n"
        "            for x in self.loader:\n                step(x)\n",
        "def validate(data):\n    loader = DataLoader(data, num_workers=4)\n    for x in loader:\n        net(x)\n\n"
        "for epoch in range(9):\n    validate(data)\n",
        "from mine import DataLoader\nloader = DataLoader(data, num_workers=4)" + EPOCHS.format("loader"),
        "loader = DataLoader(data, num_workers=4)\nother = DataLoader(data)" + EPOCHS.format("other"),
        "def test_it():\n    loader = DataLoader(data, num_workers=4)\n    for i in range(2):\n"
        "        for x in loader:\n            step(x)\n",
    ),
)
