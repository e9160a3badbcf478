"""bf16 and fp16: autocast around a module's call, with results converted back to fp32."""

from __future__ import annotations

import dis
import inspect
import os
import threading
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.worker.graph.dynamo import hide_from_dynamo
from cpulaunch.worker.reporting.events import text_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_no_function_modes: Any = torch._C.DisableTorchFunction
"""A context in which the program's torch function modes do not see reads of a tensor's type and device."""

LOW = tuple(DTYPES.values())


@record
class Mode:
    """`low`: the call computes in bf16 or fp16. `widen`: its results are converted to fp32."""

    low: bool
    widen: bool


class Precision:
    """The precision set by `--precision`. `dtype` None: autocast is left to the program.

    `cpu_only`: models of which a part is on another device are left as they are.
    """

    def __init__(self, name: str | None, *, cpu_only: bool = False) -> None:
        self.dtype = DTYPES.get(name or "")
        self._cpu_only = cpu_only
        if self.dtype is not None:
            keep_functions_in_fp32()

    def applies(self, module: nn.Module) -> bool:
        """Whether `enter` would enter autocast for a call of the module now."""
        device = device_of(module)
        if self.dtype is None or not torch.amp.is_autocast_available(device) or torch.is_autocast_enabled(device):
            return False
        return not is_low(module) and not (self._cpu_only and not is_on_cpu(module))

    def enter(self, contexts: ExitStack, module: nn.Module, *, cache: bool = True) -> Mode:
        """The mode of the call. Effect: enters autocast until `contexts` closes, if the call needs it.

        A program's own autocast remains in force. `cache`: autocast may cache casts of weights; it must not while
        tracing, because cached casts would be missing from the trace.
        """
        device = device_of(module)
        if not torch.amp.is_autocast_available(device):
            return Mode(low=False, widen=False)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if not cache:
                contexts.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            return Mode(low=dtype in LOW, widen=False)
        if self.dtype is None or is_low(module) or (self._cpu_only and device != "cpu"):
            return Mode(low=False, widen=False)
        if device == "cpu":
            allow_backward()  # The module may enable gradients itself.
            if torch.is_grad_enabled():
                _trained_by.add("Precision")
            contexts.callback(setattr, _autocast, "is_own", _autocast.is_own)
            _autocast.is_own = True
        contexts.enter_context(torch.autocast(device, dtype=self.dtype, cache_enabled=cache))
        return Mode(low=True, widen=True)


FP32 = (torch.float32,)
ONE_TYPE = {
    "_sparse_addmm": (1, FP32),  # torch.sparse.mm
    "addr": (0, FP32),
    "linalg_pinv.atol_rtol_tensor": (0, FP32),
    "_pdist_forward": (0, LOW),
    "special_i1": (0, LOW),
    "special_i1e": (0, LOW),
}
"""Operators whose backward pass fails in autocast, as seen with torch 2.13, if the argument at this position has one of
these types: it takes tensors of one type only, or none in bf16."""

_kernels: list[torch.library.Library] = []
_lock = threading.Lock()


# In a forked child, another thread's hold on it would last for ever.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def allow_backward() -> None:
    """Effect: operators compute in fp32 in autocast where their backward pass would fail, from its first call on."""
    if not _kernels:
        with _lock:
            if not _kernels:
                _install()


def _install() -> None:
    kernels = torch.library.Library("aten", "IMPL")
    for name, fails in ONE_TYPE.items():
        operator, _, overload = name.partition(".")
        with suppress(AttributeError, RuntimeError, TypeError):  # Another version of torch may have no such operator.
            kernel = partial(_in_one_type, getattr(getattr(torch.ops.aten, operator), overload or "default"), *fails)
            kernels.impl(name, kernel, "AutocastCPU", with_keyset=True)
    _kernels.append(kernels)


def _in_one_type(operator: Any, position: int, dtypes: tuple[Any, ...], keys: Any, *args: Any, **kwargs: Any) -> Any:
    autocast = torch._C.DispatchKey.AutocastCPU
    tensors = [each for each in args if isinstance(each, Tensor)]
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not is_trained or args[position].dtype not in dtypes:
        # Not Python's dispatcher again, which traces with fake tensors: it would call this function again.
        return operator.redispatch(keys & torch._C._dispatch_keyset_full_after(autocast), *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(autocast)):
        return operator(*map(widened, args), **kwargs)


class _Autocast(threading.local):
    """Whether this thread is in autocast that Precision has entered, not the program."""

    is_own = False


_autocast = _Autocast()
_graph_task = torch._C._current_graph_task_id
_trained_by: set[str] = set()
"""Who has entered autocast for training so far: Precision, or the program itself."""
MAX_LAYERS = 16
"""Decorators of one function that are looked into."""
_functions: list[Any] = []
"""torch's own Function.apply, once it is replaced."""


def keep_functions_in_fp32() -> None:
    """Effect: operators of the program compute in fp32 in autocast that Precision enters for training.

    Their backward passes are outside of it, and may take no other type; those with `custom_fwd` say themselves what
    they take. Called before the program's first line, as it may keep `apply` in a variable.
    """
    if _functions:
        return
    plain: Any = inspect.getattr_static(torch.autograd.Function, "apply")  # From torch 2.14 on it is a method of C.
    _functions.append(plain)

    @wraps(torch.autograd.Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = plain.__get__(None, cls)
        if not _is_in_own_autocast() or not _is_to_be_in_fp32(cls, args):
            return own(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return own(*map(_float, args), **dict(zip(kwargs, map(_float, kwargs.values()), strict=True)))

    for function in (apply, _is_in_own_autocast, _is_to_be_in_fp32, _float):
        hide_from_dynamo(function)
    torch.autograd.Function.apply = classmethod(apply)


def _is_to_be_in_fp32(kind: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator is the program's, does not say what types it takes, and does not write to its arguments.

    One that is given modules or functions runs them, as a checkpoint does.
    """
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")) or any(map(callable, args)):
        return False
    layers = _layers(kind.forward)
    if any(map(_says_its_types, layers)):
        return False
    if str(kind.__module__).startswith("torch."):  # Source: torch/_library/autograd.py, of torch.library.custom_op.
        operator = _cells(layers[0]).get("op") if kind.__module__ == "torch._library.autograd" else None
        return operator is not None and not operator._schema.is_mutable
    codes = [getattr(each, "__code__", None) for each in (*layers, *_layers(kind.setup_context))]
    return codes[0] is not None and not any("mark_dirty" in each.co_names for each in codes if each is not None)


def _layers(function: Any) -> list[Any]:
    """A function, and those that it wraps."""
    layers = [function]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None and len(layers) < MAX_LAYERS:
        layers.append(inner)
    return layers


def _says_its_types(function: Any) -> bool:
    """Whether this is torch.amp.custom_fwd for the CPU: those for other devices do nothing there."""
    is_made = getattr(getattr(function, "__code__", None), "co_name", "") == "decorate_fwd"
    return is_made and _cells(function).get("device_type", "cpu") == "cpu"


def _cells(function: Any) -> dict[str, Any]:
    """The variables of a function that outer functions have."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    with suppress(ValueError):  # One has no value yet.
        return dict(
            zip(names, [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()], strict=False)
        )
    return {}


def _is_in_own_autocast() -> bool:
    """Whether Precision has entered the autocast of this thread; in a backward pass, in which a checkpoint enters that
    of its forward pass again, whether operators have run in no other for training.
    """
    if _graph_task() != -1:
        return _autocast.is_own or _trained_by == {"Precision"}
    if torch.is_grad_enabled() and (_autocast.is_own or torch.is_autocast_enabled("cpu")):
        _trained_by.add("Precision" if _autocast.is_own else "program")
    return _autocast.is_own


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def place_of(module: nn.Module) -> tuple[str, bool]:
    """The module's device, and whether the program's own autocast is in force there."""
    device = device_of(module)
    return device, torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def device_of(module: nn.Module) -> str:
    """The device type of the module's first parameter or buffer, e.g. "cuda"; "cpu" if it has none."""
    with suppress(Exception), _no_function_modes():  # A class may override `parameters`.
        for tensors in (module.parameters(), module.buffers()):
            for tensor in tensors:
                return tensor.device.type
    return "cpu"


def is_on_cpu(module: nn.Module) -> bool:
    """Whether all parameters and buffers of the module are on the CPU, as far as it tells."""
    with suppress(Exception), _no_function_modes():
        return all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))
    return True


def is_low(module: nn.Module) -> bool:
    """Whether the program itself keeps this module in bf16 or fp16, by its first floating-point parameter."""
    return _weights_dtype(module) in LOW


def takes_low(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the program calls a module without floating-point parameters with tensors in bf16 or fp16.

    It computes in these types itself, and its results stay in them.
    """
    is_given = any(isinstance(each, Tensor) and each.dtype in LOW for each in (*args, *kwargs.values()))
    return is_given and _weights_dtype(module) is None


def _weights_dtype(module: nn.Module) -> torch.dtype | None:
    """The type of the module's first floating-point parameter; None if there is none, or that cannot be found out."""
    with suppress(Exception), _no_function_modes():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return None


LOW_NAMES = ("BFloat16", "bfloat16", "Half")
NO_PRIMITIVE = ("could not create a primitive", "could not execute a primitive")
"""What oneDNN says of a type for which this CPU has no instructions, as torch's LSTM in bf16 without AVX-512."""


def is_of_low_dtype(error: Exception) -> bool:
    """Whether torch rejects a tensor because it is in bf16 or fp16, or may do so."""
    text = text_of(error)
    return isinstance(error, RuntimeError | TypeError) and any(name in text for name in (*LOW_NAMES, *NO_PRIMITIVE))


DTYPE_WORDS = ("float", "half", "dtype", "primitive")


def may_be_of_low_dtype(error: Exception) -> bool:
    """Whether an error of a call in bf16 or fp16 may be one of its types, also where the program checks them itself."""
    text = text_of(error).lower()
    return isinstance(error, AssertionError) or any(word in text for word in DTYPE_WORDS)


COMPUTED = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "BINARY_SUBSCR", "BINARY_SLICE")
"""Instructions that read other things than arguments, or what `forward` may have put into them."""

OF_ANY_DTYPE = ("ndim", "shape", "device", "layout")
"""Attributes of a tensor that are the same in any type."""


def is_of_arguments(error: Exception, module: nn.Module) -> bool:
    """Whether an `assert` of the module's `forward` failed that reads nothing but arguments, which no dtype changes.

    Those that it assigns to are none, and what it calls may compute.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, AssertionError):
        return False
    code = trace.tb_frame.f_code
    if code is not getattr(type(module).forward, "__code__", None):
        return False
    arguments = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    instructions = list(dis.get_instructions(code))
    assigned = {name for each in instructions if each.opname.startswith("STORE") for name in _names(each)}
    attributes = {each.argval for each in instructions if each.opname == "STORE_ATTR"}
    failed = next(each for each in instructions if each.offset == trace.tb_lasti)
    if failed.opname != "RAISE_VARARGS" or failed.positions is None or failed.positions.lineno is None:
        return False
    start, end = failed.positions.lineno, failed.positions.end_lineno or failed.positions.lineno
    for each in instructions:
        if each.positions is None or not start <= (each.positions.lineno or 0) <= end:
            continue
        if each.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"):
            return True
        is_same = each.opname == "LOAD_ATTR" and each.argval in OF_ANY_DTYPE and each.argval not in attributes
        if "CALL" in each.opname or (each.opname in COMPUTED and not is_same) or each.argrepr in ("@", "[]"):
            return False
        if each.opname.startswith("LOAD_FAST") and not arguments.difference(assigned).issuperset(_names(each)):
            return False
    return False


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction; from Python 3.13 on it may have two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def widened(value: Any) -> Any:
    """The result with its bf16 and fp16 tensors as fp32, in the same structure; unknown objects are not converted.

    One tensor in two places stays one, and a view of another one stays its view.
    """
    if isinstance(value, Tensor):
        return _wide(value) if value.dtype in LOW else value
    from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten, rebuild

    tensors: list[Tensor] = []
    try:
        spec = flatten(value, tensors)
    except UnknownStructureError:
        return value
    low = {id(tensor): tensor for tensor in tensors if tensor.dtype in LOW}
    if not low:
        return value
    wide = dict(zip(low, _all_wide([*low.values()]), strict=True))
    return rebuild(spec, [wide.get(id(tensor), tensor) for tensor in tensors])


def _all_wide(tensors: list[Tensor]) -> list[Tensor]:
    from cpulaunch.worker.tensors.aliasing import views

    found = views([], tensors) if len(tensors) > 1 and all(map(_is_strided, tensors)) else {}
    wide = [tensor if position in found else _wide(tensor) for position, tensor in enumerate(tensors)]
    for position, view in found.items():
        is_tracked, tensor = wide[view.base].requires_grad, tensors[position]
        has_moved = wide[view.base].stride() != tensors[view.base].stride()  # Its elements overlapped.
        if has_moved or (tensor.requires_grad and not is_tracked):
            wide[position] = _wide(tensor)
        else:
            is_recorded = _is_usable(tensor) and tensor.grad_fn is not None
            with torch.set_grad_enabled(is_recorded or torch.is_grad_enabled()):
                again = view.of(wide[view.base])
            wide[position] = again if tensor.requires_grad == is_tracked else again.detach()
    return wide


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _wide(tensor: Tensor) -> Tensor:
    """The tensor as fp32; what is expanded stays so. It has a gradient if that one has, without gradients too."""
    if tensor.requires_grad and not torch.is_grad_enabled():
        with torch.enable_grad():
            return _wide(tensor)
    if tensor.requires_grad and not _is_usable(tensor):
        tensor = tensor.detach()  # The program can use it without gradients alone, too.
    if not _is_strided(tensor) or 0 not in tensor.stride():
        return tensor.float()
    once = tuple([slice(0, 1 if stride == 0 else None) for stride in tensor.stride()])
    return tensor[once].float().expand(tensor.shape)


def _is_usable(tensor: Tensor) -> bool:
    """Whether torch computes with the tensor where gradients are enabled.

    It does not with a view from no_grad, or one of several views from one operation, whose base was written to since.
    """
    try:
        return tensor.grad_fn is not None or tensor.is_leaf
    except RuntimeError:
        return False
