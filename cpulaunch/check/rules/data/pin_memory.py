"""A DataLoader without pinned memory whose batches go to a GPU."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import makes_batches_on_gpu
from cpulaunch.check.source.flow import inside, is_off, iterated, moves_to_gpu, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_open

PIN_MEMORY = 8
"""Positional arguments of a DataLoader up to pin_memory."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DataLoaders without pin_memory that a training loop runs over which moves data to a GPU."""
    for loop in training_loops(program):
        if not any(moves_to_gpu(program, node) for node in inside(program, loop)):
            continue
        for each in iterated(program, loop):
            call = program.value(each)
            if program.called(call) != "torch.utils.data.DataLoader" or not isinstance(call, ast.Call):
                continue
            if is_open(call) or len(call.args) >= PIN_MEMORY or not is_off(argument(call, "pin_memory")):
                continue
            if not makes_batches_on_gpu(program, call):
                yield Hit(node=call, seen="batches go to a GPU from a DataLoader without pin_memory")


LOOP = "for x in loader:\n    net(x.{}).backward()\n    opt.step()\n"
GPU = LOOP.format("cuda()")

RULE = Rule(
    id="pin-memory",
    summary="A DataLoader without pinned memory feeds a GPU",
    why="A copy from pageable memory to a GPU goes through a buffer of the driver and makes the program wait; from "
    "pinned memory the GPU reads by itself, and with non_blocking=True while it computes.",
    fix="Give pin_memory=True, and non_blocking=True to the copies, or run with `cpulaunch --pin-memory`.",
    find=find,
    wrong=(
        "loader = DataLoader(data, num_workers=2)  # <-\n" + GPU,
        "loader = DataLoader(data, pin_memory=False)  # <-\n" + GPU,
        "loader = DataLoader(data)  # <-\n" + LOOP.format("to('cuda')"),
        "loader = DataLoader(data)  # <-\n" + LOOP.format("to('cuda:1', non_blocking=True)"),
        "device = torch.device('cuda:0')\nloader = DataLoader(data)  # <-\n" + LOOP.format("to(device)"),
    ),
    right=(
        "loader = DataLoader(data, pin_memory=True)\n" + GPU,
        "loader = DataLoader(data, pin_memory=args.pin)\n" + GPU,
        "loader = DataLoader(data, **options)\n" + GPU,
        "loader = DataLoader(data)\n" + LOOP.format("float()"),
        "loader = DataLoader(data)\n" + LOOP.format("to(device)"),
        "device = torch.device('cpu')\nloader = DataLoader(data)\n" + LOOP.format("to(device)"),
        "loader = open_loader(data)\n" + GPU,
        "x = read().cuda()\nloader = DataLoader(torch.utils.data.TensorDataset(x))\n" + GPU,
        "class Data(Dataset):\n    def __getitem__(self, index):\n        return self.x[index].cuda()\n\n"
        "loader = DataLoader(Data())\n" + GPU,
        "def collate(batch):\n    return torch.stack(batch).cuda()\n\nloader = DataLoader(data, collate_fn=collate)\n"
        + GPU,
        "from mine import DataLoader\nloader = DataLoader(data)\n" + GPU,
        "loader = DataLoader(data)\nfor x in loader:\n    net(x.cuda())\n",
        "loader = DataLoader(data)\nloader = prepared(loader)\n" + GPU,
        "def train(loader):\n    for x in loader:\n        net(x.cuda()).backward()\n        opt.step()\n",
    ),
)
