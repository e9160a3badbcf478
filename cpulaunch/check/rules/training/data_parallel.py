"""nn.DataParallel: one process for several GPUs."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, argument

NAMES = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Calls of DataParallel, unless for one GPU, in programs that do not use DistributedDataParallel too."""
    if "DistributedDataParallel" in program.text:
        return
    for call in program.calls:
        if program.called(call) in NAMES and not is_in_test(program, call):
            devices = argument(call, "device_ids", 1)
            if not (isinstance(devices, ast.List | ast.Tuple) and len(devices.elts) < 2):
                yield Hit(node=call, seen="nn.DataParallel drives several GPUs from one process")


RULE = Rule(
    id="data-parallel",
    summary="nn.DataParallel is used for several GPUs",
    why="DataParallel copies the module to every GPU in each step and drives all of them from the threads of one "
    "process, which the interpreter's lock serializes. DistributedDataParallel keeps one process and one copy per GPU, "
    "and overlaps the gradients' reduction with backward. torch's documentation recommends it on one host "
    "too. The rule is silent in programs that know DistributedDataParallel.",
    fix="Use torch.nn.parallel.DistributedDataParallel with one process per GPU: "
    "`cpulaunch --nproc-per-node gpu train.py` starts them.",
    find=find,
    wrong=(
        "net = nn.DataParallel(net)  # <-\n",
        "net = torch.nn.DataParallel(net).cuda()  # <-\n",
        "net = nn.DataParallel(net, device_ids=[0, 1])  # <-\n",
        "from torch.nn import DataParallel as DP\nnet = DP(net, range(4))  # <-\n",
        "if torch.cuda.device_count() > 1:\n    net = nn.DataParallel(net)  # <-\n",
        "net = nn.parallel.DataParallel(\n    net)\n".replace("DataParallel(", "DataParallel(  # <-"),
    ),
    right=(
        "net = nn.parallel.DistributedDataParallel(net)\n",
        "net = nn.DataParallel(net, device_ids=[0])\n",
        "if isinstance(net, nn.DataParallel):\n    net = net.module\n",
        "from mine import DataParallel\nnet = DataParallel(net)\n",
        "class DataParallel:\n    pass\n\nnet = DataParallel()\n",
        "def test_it():\n    net = nn.DataParallel(nn.Linear(1, 1))\n",
        "wrap = nn.DataParallel\n",
        "net = nn.Linear(2, 2)\n",
        "net = nn.DataParallel(net, [1])\n",
        "def wrap(nn):\n    return nn.DataParallel(net)\n",
        "# nn.DataParallel(net)\n",
        "if rank is None:\n    net = nn.DataParallel(net)\nelse:\n    net = nn.parallel.DistributedDataParallel(net)\n",
    ),
)
