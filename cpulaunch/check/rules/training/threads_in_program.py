"""Thread counts that a program sets itself."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import is_unconditional
from cpulaunch.check.source.program import ParsedProgram, is_constant

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME")
CALLS = ("torch.set_num_threads", "torch.set_num_interop_threads")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Fixed numbers of threads that are set whenever the program runs: at the top, or in main."""
    for node in program.nodes:
        if isinstance(node, ast.Call) and program.called(node) in CALLS:
            is_fixed = len(node.args) == 1 and _is_fixed(node.args[0])
            if is_fixed and _always_runs(program, node):
                yield Hit(node=node, seen=f"{ast.unparse(node)} overrides the number that the launcher chose")
        elif isinstance(node, ast.Call) and program.called(node) == "os.environ.update":
            if any(_is_setting(*each) for each in _given(node)) and _always_runs(program, node):
                yield Hit(node=node, seen=f"{ast.unparse(node)} overrides the environment that the launcher chose")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            is_environment = program.dotted(target.value) == "os.environ"
            if is_environment and _is_setting(target.slice, node.value) and _always_runs(program, node):
                yield Hit(node=node, seen=f"{ast.unparse(node)} overrides the environment that the launcher chose")


def _given(call: ast.Call) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """The names and values that a call of update gives."""
    for each in call.args:
        if isinstance(each, ast.Dict):
            yield from zip(each.keys, each.values, strict=True)
    yield from ((ast.Constant(word.arg), word.value) for word in call.keywords)


def _is_setting(name: ast.expr | None, value: ast.expr) -> bool:
    """Whether a variable for threads gets a constant that switches nothing off."""
    return is_constant(name, *VARIABLES) and _is_fixed(value) and not is_constant(value, "disabled", "none")


def _is_fixed(value: ast.expr) -> bool:
    """Whether a value is a constant, and not one thread, which programs mean: each of many processes is to have it."""
    return isinstance(value, ast.Constant) and not is_constant(value, 1, "1")


def _always_runs(program: ParsedProgram, node: ast.AST) -> bool:
    scope = program.function(node)
    is_main = isinstance(scope, ast.FunctionDef) and scope.name == "main"
    return (is_main or scope is program.tree) and is_unconditional(program, node, scope)


RULE = Rule(
    id="threads-in-program",
    summary="The program fixes its number of threads",
    why="A constant for OMP_NUM_THREADS or torch.set_num_threads holds on one machine and for one process. It "
    "overrides what a launcher chose for this machine, and several processes with it fight for the same cores. The "
    "rule is silent about one thread: a program that sets it means each of many processes.",
    fix="Remove the line and let cpulaunch choose, or give `--cores-per-instance N`.",
    find=find,
    wrong=(
        "torch.set_num_threads(8)  # <-\n",
        "def main():\n    torch.set_num_threads(4)  # <-\n",
        "torch.set_num_interop_threads(2)  # <-\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'  # <-\n",
        "from os import environ\nenviron['KMP_AFFINITY'] = 'compact'  # <-\n",
        "if __name__ == '__main__':\n    torch.set_num_threads(8)  # <-\n    run()\n",
        "import os\nos.environ.update(OMP_NUM_THREADS='4')  # <-\n",
        "import os\nos.environ.update({'MKL_NUM_THREADS': '4', 'A': 'b'})  # <-\n",
        "from torch import set_num_threads\nset_num_threads(16)  # <-\n",
    ),
    right=(
        "torch.set_num_threads(args.threads)\n",
        "def main():\n    torch.set_num_threads(1)\n",
        "import os\nos.environ['MKL_NUM_THREADS'] = '1'\n",
        "if args.single:\n    torch.set_num_threads(1)\n",
        "def worker_init(index):\n    torch.set_num_threads(1)\n",
        "import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = str(count)\n",
        "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\n",
        "print(torch.get_num_threads())\n",
        "import os\nprint(os.environ['OMP_NUM_THREADS'])\n",
        "import os\nimport torch.multiprocessing as mp\nos.environ['OMP_NUM_THREADS'] = '1'\nmp.spawn(run, nprocs=8)\n",
        "from gymnasium.vector import AsyncVectorEnv\ntorch.set_num_threads(1)\n",
        "class Test:\n    def setUp(self):\n        torch.set_num_threads(1)\n",
        "environ['OMP_NUM_THREADS'] = '4'\n",
        "import os\nos.environ['KMP_AFFINITY'] = 'disabled'\n",
        "if __name__ == '__main__':\n    run()\n",
        "if __name__ == '__main__':\n    if args.few:\n        torch.set_num_threads(2)\n",
        "import os\nos.environ.update({'OMP_NUM_THREADS': str(count), **more})\n",
        "import os\nif 'OMP_NUM_THREADS' not in os.environ:\n    os.environ['OMP_NUM_THREADS'] = '4'\n",
    ),
)
