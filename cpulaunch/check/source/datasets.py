"""Data sets and loaders in a program: their classes, what collates their batches, the loops that run over them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from cpulaunch.check.source.flow import LOOPS, inside, moves_to_gpu, passes
from cpulaunch.check.source.program import FUNCTIONS, ParsedProgram, argument

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOADER = "torch.utils.data.DataLoader"
BASES = (
    *("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset"),
    *("torchvision.datasets.VisionDataset", "torchvision.datasets.vision.VisionDataset"),
)


@lru_cache(maxsize=2)
def dataset_classes(program: ParsedProgram) -> tuple[ast.ClassDef, ...]:
    """Classes of map-style data sets."""
    classes = (node for node in program.nodes if isinstance(node, ast.ClassDef))
    return tuple(each for each in classes if any(program.dotted(base) in BASES for base in each.bases))


def methods(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Name -> method of a class."""
    return {each.name: each for each in owner.body if isinstance(each, ast.FunctionDef)}


@lru_cache(maxsize=2)
def loaders(program: ParsedProgram) -> tuple[ast.Call, ...]:
    """Calls that make a DataLoader."""
    return tuple(
        call for call in program.calls if program.called(call) in (LOADER, "torch.utils.data.dataloader.DataLoader")
    )


def passes_over(program: ParsedProgram, loader: ast.Call) -> Sequence[ast.AST]:
    """What begins the passes of for loops over a loader, as far as data flow tells: a loop, or a call before it."""
    return _passes_by_source(program).get(loader, ())


@lru_cache(maxsize=2)
def _passes_by_source(program: ParsedProgram) -> Mapping[ast.AST | None, Sequence[ast.AST]]:
    """What for loops run over -> what begins the passes."""
    found: dict[ast.AST | None, list[ast.AST]] = {}
    for loop in program.nodes:
        if isinstance(loop, ast.For):
            for source, start in dict.fromkeys((program.value(each), start) for each, start in passes(program, loop)):
                found.setdefault(source, []).append(start)
    return found


def loops_around(program: ParsedProgram, node: ast.AST) -> Iterator[ast.AST]:
    """The loops that a node runs in: around it, and around the only call of its function, from the inside out."""
    seen: set[ast.AST] = set()
    before, around = node, program.around(node)
    is_repeated = is_iterator = False  # Of a comprehension, the first iterator is made once.
    while (each := next(around, None)) is not None and each not in seen:
        if isinstance(each, LOOPS) and (is_repeated or before not in (getattr(each, "iter", None), *each.orelse)):
            yield each
        is_first = isinstance(each, COMPREHENSIONS) and is_iterator and before is each.generators[0]
        goes_on = is_repeated and isinstance(each, ast.expr | ast.keyword | ast.comprehension)
        is_repeated = goes_on or (isinstance(each, COMPREHENSIONS) and not is_first)
        is_iterator = isinstance(each, ast.comprehension) and before is each.iter
        before = each
        if isinstance(each, FUNCTIONS):
            seen.add(each)
            call = program.caller(each)
            around = iter(()) if call is None else program.around(call)
            before = call or each


def collate_function(program: ParsedProgram, loader: ast.Call) -> ast.AST | None:
    """The function of this file, or the `__call__` of its class, that makes a loader's batches."""
    given = program.value(argument(loader, "collate_fn", 6))
    if program.called(given) == "functools.partial" and isinstance(given, ast.Call) and given.args:
        given = program.value(given.args[0])
    if isinstance(given, ast.Call):
        given = program.value(given.func)
        if isinstance(given, ast.ClassDef):
            return methods(given).get("__call__")
        return None
    return given if isinstance(given, FUNCTIONS) else None


def makes_batches_on_gpu(program: ParsedProgram, loader: ast.Call) -> bool:
    """Whether a loader's batches are on a GPU already: they cannot be pinned, nor made by forked workers."""
    data = program.value(argument(loader, "dataset", 0))
    given = data.args if isinstance(data, ast.Call) else ()
    made = program.value(data.func) if isinstance(data, ast.Call) else None
    collate = program.value(argument(loader, "collate_fn", 6))
    parts = (data, made, collate, collate_function(program, loader), *map(program.value, given))
    return any(_moves_or_makes(program, node) for part in parts if part is not None for node in ast.walk(part))


def _moves_or_makes(program: ParsedProgram, node: ast.AST) -> bool:
    return moves_to_gpu(program, node) or (isinstance(node, ast.keyword) and node.arg == "device")


def pads_batches(program: ParsedProgram, loader: ast.Call) -> bool:
    """Whether a loader's batches are as long as their longest sample."""
    function = collate_function(program, loader)
    return function is not None and any(
        program.called(node) == "torch.nn.utils.rnn.pad_sequence" for node in inside(program, function)
    )
