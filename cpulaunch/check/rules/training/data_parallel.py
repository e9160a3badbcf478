"""nn.DataParallel: one process for several GPUs."""

import ast
import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import ParsedProgram, argument, method

NAMES = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")

INFERENCE = re.compile(r"infer|predict|sampl|eval|valid|demo|generat|reconstruct|visual", re.IGNORECASE)
"""Names of functions that train nothing."""
OPTION = re.compile(r"(^|[._ ])(test|eval|infer|predict|demo)", re.IGNORECASE)
"""Options that make a program train nothing."""
GPU = re.compile(r"cuda|gpu", re.IGNORECASE)


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Calls of DataParallel, unless for one GPU, in programs that train and do not use DistributedDataParallel too."""
    if "DistributedDataParallel" in program.text or not any(method(call) == "backward" for call in program.calls):
        return
    for call in program.calls:
        if program.called(call) in NAMES and not (is_in_test(program, call) or _trains_nothing(program, call)):
            devices = argument(call, "device_ids", 1)
            if not (isinstance(devices, ast.List | ast.Tuple) and len(devices.elts) < 2):
                yield Hit(node=call, seen="nn.DataParallel drives several GPUs from one process")


def _trains_nothing(program: ParsedProgram, call: ast.Call) -> bool:
    """Whether a call is in a function for inference, or where the program found no GPU."""
    inner: ast.AST = call
    for each in program.around(call):
        if isinstance(each, ast.FunctionDef) and INFERENCE.search(each.name):
            return True
        if isinstance(each, ast.If) and inner in each.orelse and GPU.search(ast.unparse(each.test)):
            return True
        if isinstance(each, ast.If) and inner in each.body and OPTION.search(ast.unparse(each.test)):
            return True
        inner = each
    return False


STEP = "\nnet(x).backward()\n"

RULE = Rule(
    id="data-parallel",
    summary="nn.DataParallel is used for several GPUs",
    why="DataParallel copies the module to every GPU in each step and drives all of them from the threads of one "
    "process, which the interpreter's lock serializes. DistributedDataParallel keeps one process and one copy per GPU, "
    "and overlaps the gradients' reduction with backward. torch's documentation recommends it on one host "
    "too. The rule is silent in files that do not train, and in those that know DistributedDataParallel.",
    fix="Use torch.nn.parallel.DistributedDataParallel with one process per GPU: "
    "`cpulaunch --nproc-per-node gpu train.py` starts them.",
    find=find,
    wrong=(
        "net = nn.DataParallel(net)  # <-" + STEP,
        "net = torch.nn.DataParallel(net).cuda()  # <-" + STEP,
        "net = nn.DataParallel(net, device_ids=[0, 1])  # <-" + STEP,
        "from torch.nn import DataParallel as DP\nnet = DP(net, range(4))  # <-" + STEP,
        "if torch.cuda.device_count() > 1:\n    net = nn.DataParallel(net)  # <-" + STEP,
        "net = nn.parallel.DataParallel(\n    net)".replace("DataParallel(", "DataParallel(  # <-") + STEP,
    ),
    right=(
        "net = nn.parallel.DistributedDataParallel(net)" + STEP,
        "net = nn.DataParallel(net, device_ids=[0])" + STEP,
        "net = nn.DataParallel(net)\nnet.load_state_dict(torch.load('net.pt'))\ny = net(x)\n",
        "def sample(net):\n    net = nn.DataParallel(net)\n    return net(x)\n" + STEP,
        "if args.test_only:\n    net = nn.DataParallel(net)\n    print(net(x))\n    exit()" + STEP,
        "if torch.cuda.is_available():\n    net = net.cuda()\nelse:\n    net = nn.DataParallel(net)" + STEP,
        "if isinstance(net, nn.DataParallel):\n    net = net.module\n",
        "from mine import DataParallel\nnet = DataParallel(net)" + STEP,
        "class DataParallel:\n    pass\n\nnet = DataParallel()" + STEP,
        "def test_it():\n    net = nn.DataParallel(nn.Linear(1, 1))\n" + STEP,
        "wrap = nn.DataParallel\n",
        "net = nn.Linear(2, 2)\n",
        "net = nn.DataParallel(net, [1])" + STEP,
        "def wrap(nn):\n    return nn.DataParallel(net)\n" + STEP,
        "# nn.DataParallel(net)" + STEP,
        "if rank is None:\n    net = nn.DataParallel(net)\nelse:\n    net = nn.parallel.DistributedDataParallel(net)"
        + STEP,
    ),
)
