"""A graph from Dynamo, traced by TorchScript, frozen, and fused by oneDNN Graph.

Source: pytorch/torch/csrc/jit/codegen/onednn/README.md: enable fusion, trace, freeze, two warm-up calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cpulaunch.records.record import record
from cpulaunch.worker.fusion.exclusion import leave_out
from cpulaunch.worker.fusion.not_a_number import Safeguards, is_small, safeguards
from cpulaunch.worker.fusion.portable import Function, PortableGraph, fusible_function_of, graph_of, portable
from cpulaunch.worker.fusion.trial import WARM_UP_CALLS
from cpulaunch.worker.graph.precision import widened
from cpulaunch.worker.graph.silent_logging import silent_warnings
from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.owners import owned

_compiling = threading.RLock()


def after_fork() -> None:
    """Effect: in a forked process, frees the lock, which a thread of the parent may have held."""
    global _compiling
    _compiling = threading.RLock()


@record
class Frozen:
    """A graph with its weights as constants, and what keeps NaN; its inputs are those of the call in `used`.

    `bytes`: memory of its constants besides the module's own. `asserted`: how many of its own results, the last ones,
    must be true.
    """

    safeguards: Safeguards
    used: tuple[int, ...]
    bytes: int
    asserted: int = 0

    @property
    def graph(self) -> PortableGraph:
        """The graph, with the values that are watched among its results."""
        return self.safeguards.graph

    def inputs_of(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs of the graph, of a call with these inputs."""
        return tuple(inputs[index] for index in self.used)

    def accepts(self, inputs: Sequence[Tensor]) -> bool:
        """Whether NaN cannot be lost in a call with these inputs, as far as these decide."""
        return all(check.holds(self.inputs_of(inputs)) for check in self.safeguards.checks)


class UnboundedError(Exception):
    """A value inside a graph is one for which its results may be wrong."""


def freeze(
    graph: torch.fx.GraphModule,
    sources: tuple[int | Tensor, ...],
    inputs: list[Tensor],
    enter_precision: Callable[[ExitStack], bool],
    *,
    replaces_attention: bool = False,
    asserted: int = 0,
) -> Frozen:
    """The graph with its weights as constants, for inputs like these.

    `enter_precision` enters the precision to trace in and says whether outputs become fp32. Later calls run without
    autocast, because the trace contains its casts. `replaces_attention`: see fusion/not_a_number.py, ATTENTION.
    `asserted`: see Frozen.
    Effect: torch's global JIT settings are restored. Raises: any error of torch.
    """
    used = tuple(dict.fromkeys(source for source in sources if isinstance(source, int)))
    examples = tuple(inputs[index] for index in used)
    with _compiling, silent_warnings(), _fusion():
        with ExitStack() as contexts:
            bound = _Bound(graph, sources, used, enter_precision(contexts)).eval()
            traced = torch.jit.trace(bound, examples, check_trace=False, strict=False)
        frozen = portable(torch.jit.freeze(traced))
    own = {storage_of(source) for source in sources if isinstance(source, Tensor)}
    _count_views(frozen, own)
    kept = safeguards(
        frozen,
        examples,
        has_single_variance=_has_single_variance(traced),
        replaces_attention=replaces_attention,
    )
    return Frozen(safeguards=kept, used=used, bytes=_constant_bytes(frozen, own), asserted=asserted)


def _count_views(graph: PortableGraph, own: set[int]) -> None:
    """Effect: constants in the memory of weights, at the addresses in `own`, are cpulaunch's.

    TorchScript computes views of weights at once.
    """
    for value in graph.constants:
        if isinstance(value, Tensor) and value.layout is torch.strided and storage_of(value) in own:
            owned(value)


def _has_single_variance(traced: Any) -> bool:
    """Whether the variance of one element, which is NaN, may be computed: the frozen graph has no shapes."""
    kinds = ("aten::var", "aten::std", "aten::var_mean", "aten::std_mean")
    graph = traced.inlined_graph  # Its nodes end with it.
    nodes = [node for kind in kinds for node in graph.findAllNodes(kind)]
    return any(_elements(node.inputsAt(0)) <= _elements(node.outputsAt(0)) for node in nodes)


def _elements(value: Any) -> int:
    sizes = value.type().sizes()
    return 0 if sizes is None else prod(sizes)


def compile_graph(frozen: Frozen, left_out: frozenset[int], inputs: Sequence[Tensor]) -> Function:
    """A function that runs the graph for calls with inputs like these; operations at these positions are not fused.

    It raises UnboundedError where NaN may have been lost, or an assertion about values does not hold.

    The warm-up calls run without autocast: a graph that is called under a different autocast state is optimized again,
    without fusion (seen with torch 2.13).
    Effect: torch's global JIT settings are restored. Raises: any error of torch and oneDNN.
    """
    with _compiling, silent_warnings(), _fusion():
        graph = graph_of(frozen.graph)
        leave_out(graph, left_out)
        function = fusible_function_of(graph)
        for _ in range(WARM_UP_CALLS):
            function(*frozen.inputs_of(inputs))
    function = _checking(function, frozen.safeguards.watched, is_small, "a value inside it is NaN, infinite or huge")
    function = _checking(function, frozen.asserted, bool, "what it asserts about values does not hold")
    if frozen.used == tuple(range(len(inputs))):
        return function
    return lambda *given: function(*frozen.inputs_of(given))


def _checking(function: Function, count: int, holds: Callable[[Tensor], bool], failure: str) -> Function:
    """The function without its last results, so many, for each of which `holds` must be true."""
    if not count:
        return function

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = function(*inputs)
        if not all(map(holds, outputs[-count:])):
            raise UnboundedError(failure)
        return outputs[:-count]

    return run


class _Bound(nn.Module):
    """The graph as a module whose inputs are tensors of the call; the frozen tensors are bound."""

    def __init__(
        self, graph: torch.fx.GraphModule, sources: tuple[int | Tensor, ...], used: tuple[int, ...], widen: bool
    ) -> None:
        super().__init__()
        self.graph = graph
        self._sources = sources
        self._used = used
        self._widen = widen

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._used, inputs, strict=True))
        arguments = [given[source] if isinstance(source, int) else source for source in self._sources]
        with _Fusible([source for source in self._sources if isinstance(source, Tensor)]):
            outputs = self.graph(*arguments)
        return tuple(widened(output) for output in outputs) if self._widen else tuple(outputs)


class _Fusible(TorchFunctionMode):
    """Replaces operations that oneDNN Graph cannot compile, or that are slow, by equivalent ones.

    Seen with torch 2.13: a fused addmm with a vector, as in GPT-2's Conv1D, raises "vector::_M_range_check" when it is
    called; a concatenation with an empty tensor, as of an empty key-value cache, raises "partition compile failed".
    TorchScript has no operation whose number is True or False. Slow: indexing with several constant index tensors.
    """

    def __init__(self, constants: list[Tensor]) -> None:
        super().__init__()
        self._constants = {id(tensor) for tensor in constants}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _with_numbers(getattr(func, "__name__", ""), args, kwargs or {})
        if func is torch.addmm and not kwargs and len(args) == 3 and args[0].dim() == 1:
            bias, matrix, weight = args
            return F.linear(matrix, weight.t(), bias)
        if func is torch.cat and args:
            full = [tensor for tensor in args[0] if tensor.numel()]
            if len(full) == 1:
                return full[0].to(_common_type(args[0]), copy=True, memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__ and (picked := self._picked(*args)) is not None:
            return picked
        return func(*args, **kwargs)

    def _picked(self, tensor: Tensor, index: Any) -> Tensor | None:
        """`tensor[:, ..., rows, columns]` with constant indices, as in DLRM; None for any other index."""
        if type(index) is not tuple or len(index) != tensor.dim() or len(index) < 3:
            return None
        *before, rows, columns = index
        if any(type(part) is not slice or part != slice(None) for part in before):
            return None
        if not all(id(part) in self._constants and _is_index_list(part) for part in (rows, columns)):
            return None
        return _pick(tensor, rows, columns) if rows.shape == columns.shape else None


_NUMBERS = dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le", "fill_", "full_like"), 1)
_NUMBERS |= dict.fromkeys(("__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__"), 1)
_NUMBERS |= dict.fromkeys(("masked_fill", "masked_fill_", "new_full"), 2)
_NUMBERS |= dict.fromkeys(("scatter", "scatter_", "index_fill", "index_fill_"), 3)
"""Operations whose result has the same type for True as for 1, and the position of that argument."""

_NAMES_OF_NUMBERS = ("value", "fill_value", "other")


def _with_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation with numbers, or tensors, instead of True and False where it takes numbers."""
    if name == "where":
        return tuple(map(_tensor, args)), {key: _tensor(value) for key, value in kwargs.items()}
    if name == "full" and any(isinstance(value, bool) for value in (*args[1:2], kwargs.get("fill_value"))):
        given = kwargs.get("dtype") is not None or kwargs.get("out") is not None
        kwargs = kwargs if given else kwargs | {"dtype": torch.bool}
    elif name not in _NUMBERS:
        return args, kwargs
    position = _NUMBERS.get(name, 1)
    changed = tuple(_number(value) if index == position else value for index, value in enumerate(args))
    return changed, {key: _number(value) if key in _NAMES_OF_NUMBERS else value for key, value in kwargs.items()}


def _tensor(value: object) -> object:
    return torch.tensor(value) if isinstance(value, bool) else value


def _number(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


def _is_index_list(index: Tensor) -> bool:
    return index.dtype is torch.int64 and index.dim() == 1 and index.numel() > 0


def _pick(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor | None:
    """The elements at (row, column) of the last two dimensions; None if an index is negative or out of range."""
    height, width = tensor.shape[-2:]
    if any(index.min() < 0 or index.max() >= size for index, size in ((rows, height), (columns, width))):
        return None
    flat = tensor.flatten(-2)
    return flat.gather(-1, (rows * width + columns).expand(*flat.shape[:-1], -1))


def _common_type(tensors: Any) -> torch.dtype:
    """The dtype of torch.cat's result."""
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype)
    return common


@contextmanager
def _fusion() -> Iterator[None]:
    """Effect: inside the context oneDNN fuses graphs, and the JIT does not apply autocast to them by itself."""
    fused = torch._C._jit_llga_enabled()
    autocast = torch._C._jit_set_autocast_mode(False)
    torch._C._jit_set_llga_enabled(True)
    try:
        yield
    finally:
        torch._C._jit_set_llga_enabled(fused)
        torch._C._jit_set_autocast_mode(autocast)


def _constant_bytes(graph: PortableGraph, own: set[int]) -> int:
    """Bytes of the graph's constants, without those in the storages at the addresses in `own`."""
    tensors = (value for value in graph.constants if isinstance(value, Tensor))
    sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for address, size in sizes.items() if address not in own)
