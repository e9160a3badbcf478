"""Root-mean-square norms of a few rows in one pass over memory instead of six operations.

A class is recognized by what its `forward` computes, whatever it is called: its bytecode may only read attributes and
call functions without effects, and torch.fx traces these to `x * rsqrt(mean(x ** 2) + eps) * weight`, in some spelling.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from cpulaunch.records.record import record
from cpulaunch.worker.weights.functions import replace_forward
from cpulaunch.worker.weights.library import library

MAX_ROWS = 16
"""More rows are limited by memory and arithmetic, and torch uses several threads for them."""

_ATTRIBUTES = ("normalized_shape", "eps", "variance_epsilon", "epsilon")

_PURE_NAMES = frozenset(
    (
        *(
            "torch",
            "float32",
            "bfloat16",
            "float16",
            "dtype",
            "to",
            "float",
            "pow",
            "square",
            "mean",
            "rsqrt",
            "type_as",
        ),
        *("nn", "functional", "F", "rms_norm", "weight", *_ATTRIBUTES),
    )
)
"""Names that a recognized `forward` may use, besides methods of its class of which the same is true."""

_FORBIDDEN = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE", "IMPORT", "YIELD", "RAISE", "STORE_DEREF")
MAX_DEPTH = 3


@record
class Norm:
    """A recognized norm. `offset` is added to the weight.

    `state`: the module's attributes that `forward` may read; `methods`: those of its class that it may call.
    """

    epsilon: float
    offset: float
    state: tuple[tuple[str, Any], ...]
    methods: tuple[tuple[str, Any], ...]
    forward: Any


def recognized(module: nn.Module) -> Norm | None:
    """The norm that the module computes; None if it computes something else, or that is not certain."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or any(True for _ in module.children()):
        return None
    forward = type(module).forward
    if "forward" in vars(module) or any(True for _ in module.buffers()) or not _is_pure(forward, type(module)):
        return None
    if any(hasattr(type(module), name) for name in _ATTRIBUTES):  # It may change for all modules of the class.
        return None
    try:
        found = _match(_Tracer().trace(module))
    except Exception:  # noqa: BLE001  A class that fx cannot trace is left alone.
        return None
    if found is None:
        return None
    state = tuple((name, value) for name, value in vars(module).items() if name in _ATTRIBUTES)
    methods = _methods(forward, type(module))
    if any(name in vars(module) for name, _ in methods):
        return None
    return Norm(epsilon=found[0], offset=found[1], state=state, methods=methods, forward=forward)


class _Weight(fx.Proxy):
    """The weight while fx traces: the type it has where the faster path is taken."""

    dtype = torch.float32


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Weight(node, self) if node.op == "get_attr" else super().proxy(node)


def _is_pure(function: object, owner: type, depth: int = 0) -> bool:
    """Whether the bytecode of a method stores nothing outside and calls nothing but torch's functions and its own."""
    if not isinstance(function, FunctionType) or depth > MAX_DEPTH or function.__code__.co_freevars:
        return False
    if any(line.opname.startswith(_FORBIDDEN) or _is_in_place(line) for line in dis.get_instructions(function)):
        return False
    return all(_is_pure_name(name, owner, depth) for name in function.__code__.co_names)


def _is_in_place(line: dis.Instruction) -> bool:
    """Whether an operator such as `*=`, which changes a tensor, is used. torch.fx takes it for `*`."""
    return line.opname == "BINARY_OP" and line.argrepr.endswith("=")


def _is_pure_name(name: str, owner: type, depth: int) -> bool:
    return name in _PURE_NAMES or _is_pure(getattr(owner, name, None), owner, depth + 1)


def _methods(function: FunctionType, owner: type) -> tuple[tuple[str, Any], ...]:
    """Names and functions of the class's own methods that a pure method calls, and those that these call."""
    own = [(name, getattr(owner, name)) for name in function.__code__.co_names if name not in _PURE_NAMES]
    return (*own, *(each for _, method in own for each in _methods(method, owner)))


def _match(graph: fx.Graph) -> tuple[float, float] | None:
    """Epsilon and the weight's offset of the norm that a graph computes for fp32; None if it computes another thing."""
    forms: dict[fx.Node, Any] = {}
    result: Any = None
    for node in graph.nodes:
        if node.op == "output":
            result = _form(node.args[0], forms)
        else:
            forms[node] = _interpret(node, forms)
    return result[1:] if isinstance(result, tuple) and result[0] == "result" else None


def _form(value: Any, forms: dict[fx.Node, Any]) -> Any:
    """What a value is: a form such as "x", or a number."""
    return forms.get(value) if isinstance(value, fx.Node) else value


def _interpret(node: fx.Node, forms: dict[fx.Node, Any]) -> Any:
    """The form of a node; None if it is none of a norm's."""
    if node.op == "placeholder":
        return "x" if node.name == next(iter(node.graph.nodes)).name else None
    if node.op == "get_attr":
        return ("weight", 0.0) if node.target == "weight" else None
    values = [_form(value, forms) for value in node.args]
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.target is getattr:
        return "dtype" if node.args[1] == "dtype" else None
    if node.target is F.rms_norm:
        return _of_torch(node, forms)
    if name in ("to", "float", "type_as"):
        return values[0] if all(_is_dtype(value) for value in [*values[1:], *node.kwargs.values()]) else None
    return _STEPS[str(name)](values, dict(node.kwargs)) if str(name) in _STEPS else None


def _is_dtype(value: Any) -> bool:
    """Whether a conversion to it changes nothing, if the input and the weight are in fp32."""
    return value in (torch.float32, "dtype", "x") or (isinstance(value, tuple) and value[0] in ("normed", "result"))


def _power(values: list[Any], options: dict[str, Any]) -> Any:
    return "squares" if values in (["x", 2], ["x", 2.0]) and not options else None


def _square(values: list[Any], options: dict[str, Any]) -> Any:
    return "squares" if values == ["x"] and not options else None


def _mean(values: list[Any], options: dict[str, Any]) -> Any:
    given = dict(zip(("x", "dim", "keepdim"), values, strict=False)) | options
    is_last = given.get("dim") in (-1, [-1], (-1,)) and given.get("keepdim") is True and len(given) == 3
    return "mean" if values[0] == "squares" and is_last else None


def _add(values: list[Any], options: dict[str, Any]) -> Any:
    if len(values) != 2 or options:
        return None
    for one, other in (values, values[::-1]):
        if one == "mean" and type(other) is float:
            return ("shifted", other)
        if one == ("weight", 0.0) and type(other) in (int, float):
            return ("weight", float(other))
    return None


def _rsqrt(values: list[Any], options: dict[str, Any]) -> Any:
    form = values[0]
    return ("factor", form[1]) if isinstance(form, tuple) and form[0] == "shifted" and len(values) == 1 else None


def _multiply(values: list[Any], options: dict[str, Any]) -> Any:
    if len(values) != 2 or options:
        return None
    for one, other in (values, values[::-1]):
        if one == "x" and isinstance(other, tuple) and other[0] == "factor":
            return ("normed", other[1])
        if isinstance(one, tuple) and one[0] == "normed" and isinstance(other, tuple) and other[0] == "weight":
            return ("result", one[1], other[1])
    return None


def _of_torch(node: fx.Node, forms: dict[fx.Node, Any]) -> Any:
    """torch's own rms_norm over the last dimension."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    shape: Any = given.get("normalized_shape")
    if _form(given.get("input"), forms) != "x" or _form(given.get("weight"), forms) != ("weight", 0.0):
        return None
    epsilon = given.get("eps")
    if len(shape) != 1 or not (epsilon is None or type(epsilon) is float):
        return None
    return ("result", torch.finfo(torch.float32).eps if epsilon is None else epsilon, 0.0)


_STEPS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "pow": _power,
    "square": _square,
    "mean": _mean,
    "add": _add,
    "rsqrt": _rsqrt,
    "mul": _multiply,
}


class Norms:
    """The recognized norms of a process."""

    def __init__(self) -> None:
        self._norms: dict[int, tuple[weakref.ref[nn.Module], Norm]] = {}

    def add(self, module: nn.Module) -> None:
        """Effect: recognizes the norms among the parts of a module."""
        if library() is None:
            return
        for part in module.modules():
            if id(part) in self._norms or (norm := recognized(part)) is None:
                continue
            key = id(part)
            self._norms[key] = weakref.ref(part, lambda _, key=key: self._norms.pop(key, None)), norm  # type: ignore[misc]
            replace_forward(type(part), norm.forward)

    def compute(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The norm of the rows of x; None if torch must compute it."""
        found = self._norms.get(id(module))
        weight = module._parameters.get("weight")
        loaded = library()
        if found is None or weight is None or loaded is None or type(weight) is not nn.Parameter:
            return None
        norm = found[1]
        columns = weight.shape[0]
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not (x.is_cpu and weight.is_cpu):
            return None
        if x.shape[-1:] != weight.shape or not 0 < x.numel() <= MAX_ROWS * columns or not x.is_contiguous():
            return None
        attributes = vars(module)
        if any(attributes.get(name) is not value for name, value in norm.state) or not weight.is_contiguous():
            return None
        kind = type(module)
        if any(name in attributes or getattr(kind, name, None) is not method for name, method in norm.methods):
            return None
        output = torch.empty_like(x)
        rows = x.numel() // columns
        loaded.rms_norm(x.data_ptr(), weight.data_ptr(), output.data_ptr(), rows, columns, norm.epsilon, norm.offset)
        return output
