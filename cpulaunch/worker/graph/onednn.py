"""Dynamo's graph traced, frozen and fused by oneDNN Graph.

Source: pytorch/torch/csrc/jit/codegen/onednn/README.md: enable fusion, trace, freeze, two warm-up calls.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cpulaunch.records.record import record
from cpulaunch.worker.graph.precision import widened

WARM_UP_CALLS = 2
"""The first is profiled, at the second the graph is fused and its weights are packed."""

_compiling = threading.RLock()


@record
class Frozen:
    """`run(*inputs)` gives the graph's outputs; `bytes` are those of constants that are not the module's own memory."""

    run: Callable[..., tuple[Tensor, ...]]
    bytes: int


def freeze(
    graph: torch.fx.GraphModule,
    sources: tuple[int | Tensor, ...],
    inputs: list[Tensor],
    precise: Callable[[ExitStack], bool],
) -> Frozen:
    """The graph with its weights as constants, for inputs like these.

    `precise` enters the precision to trace in, and says whether outputs become fp32. Calls need no autocast: the trace
    has its casts. Warming up is done as calls will be: a graph is optimized anew, and without fusion, where autocast
    is not what it was (seen with torch 2.13).
    Effect: none on torch's global JIT settings once it returns. Raises: whatever torch raises.
    """
    used = tuple(dict.fromkeys(source for source in sources if isinstance(source, int)))
    examples = tuple(inputs[index] for index in used)
    with _compiling, warnings.catch_warnings(), _fusion():
        warnings.simplefilter("ignore")
        with ExitStack() as contexts:
            bound = _Bound(graph, sources, used, precise(contexts)).eval()
            traced = torch.jit.trace(bound, examples, check_trace=False, strict=False)
        frozen = torch.jit.freeze(traced)
        for _ in range(WARM_UP_CALLS):
            frozen.forward(*examples)
    own = {source.data_ptr() for source in sources if isinstance(source, Tensor)}
    forward = frozen.forward  # Without what nn.Module does around it: a graph has no hooks.
    run = forward if used == tuple(range(len(inputs))) else _choosing(forward, used)
    return Frozen(run=run, bytes=_constant_bytes(frozen, own))


def _choosing(frozen: Callable[..., Any], used: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = frozen(*[inputs[index] for index in used])
        return outputs

    return run


class _Bound(nn.Module):
    """The graph as a function of the call's tensors only."""

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
    """Writes what oneDNN Graph cannot compile as what it can, with the same result.

    Seen with torch 2.13: a fused addmm with a vector, as in GPT-2's Conv1D, raises "vector::_M_range_check" when it is
    called; a concatenation with an empty tensor, as of an empty key-value cache, "partition compile failed".
    And what is slow as what is fast: elements picked by several constant index tensors.
    """

    def __init__(self, constants: list[Tensor]) -> None:
        super().__init__()
        self._constants = {id(tensor) for tensor in constants}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        """`tensor[:, ..., rows, columns]` with constant indices, as DLRM picks its products; None for anything else."""
        if type(index) is not tuple or len(index) != tensor.dim() or len(index) < 3:
            return None
        *before, rows, columns = index
        if any(type(part) is not slice or part != slice(None) for part in before):
            return None
        if not all(id(part) in self._constants and _is_list(part) for part in (rows, columns)):
            return None
        return _pick(tensor, rows, columns) if rows.shape == columns.shape else None


def _is_list(index: Tensor) -> bool:
    return index.dtype is torch.int64 and index.dim() == 1 and index.numel() > 0


def _pick(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor | None:
    """The elements at these places of the last two dimensions, by one index each; None where an index is negative."""
    height, width = tensor.shape[-2:]
    if any(index.min() < 0 or index.max() >= size for index, size in ((rows, height), (columns, width))):
        return None
    flat = tensor.flatten(-2)
    return flat.gather(-1, (rows * width + columns).expand(*flat.shape[:-1], -1))


def _common_type(tensors: Any) -> torch.dtype:
    """The type torch.cat gives its result."""
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype)
    return common


@contextmanager
def _fusion() -> Iterator[None]:
    """Effect: while it lasts, graphs are fused by oneDNN, and autocast is what was traced rather than a pass."""
    fused = torch._C._jit_llga_enabled()
    autocast = torch._C._jit_set_autocast_mode(False)
    torch._C._jit_set_llga_enabled(True)
    try:
        yield
    finally:
        torch._C._jit_set_llga_enabled(fused)
        torch._C._jit_set_autocast_mode(autocast)


def _constant_bytes(frozen: Any, own: set[int]) -> int:
    """Memory of the graph's constants besides the module's own."""
    sizes: dict[int, int] = {}
    for node in frozen.graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if isinstance(value, Tensor) and value.data_ptr() not in own:
            sizes[value.data_ptr()] = value.untyped_storage().nbytes()
    return sum(sizes.values())
