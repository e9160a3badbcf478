"""bf16 and fp16: autocast around a module's call, with results converted back to fp32."""

from __future__ import annotations

import dis
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from cpulaunch.records.record import record
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
        if device == "cpu" and torch.is_grad_enabled():
            allow_backward(self.dtype)
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


def allow_backward(dtype: torch.dtype) -> None:
    """Effect: lets backward passes of calls in autocast run that take one type only, from its first call on.

    Operators compute in fp32 where their backward pass would fail. One that a program wrote without `custom_bwd` and
    that fails for its types runs again as `custom_bwd` would run it: in autocast, with gradients in fp32.
    """
    if _kernels:
        return
    _kernels.append(torch.library.Library("aten", "IMPL"))
    for name, fails in ONE_TYPE.items():
        operator, _, overload = name.partition(".")
        kernel = partial(_in_one_type, getattr(getattr(torch.ops.aten, operator), overload or "default"), *fails)
        _kernels[0].impl(name, kernel, "AutocastCPU", with_keyset=True)
    BackwardCFunction.apply = _bearing(BackwardCFunction.apply, dtype)


def _in_one_type(operator: Any, position: int, dtypes: tuple[Any, ...], keys: Any, *args: Any, **kwargs: Any) -> Any:
    autocast = torch._C.DispatchKey.AutocastCPU
    tensors = [each for each in args if isinstance(each, Tensor)]
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not is_trained or args[position].dtype not in dtypes:
        return operator.redispatch(keys.remove(autocast), *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(autocast)):
        return operator(*map(widened, args), **kwargs)


def _bearing(plain: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @wraps(plain)
    def apply(self: Any, *gradients: Any) -> Any:
        try:
            return plain(self, *gradients)
        except (RuntimeError, TypeError) as error:
            if not is_of_low_dtype(error) or torch.is_autocast_enabled("cpu"):
                raise
        with torch.autocast("cpu", dtype=dtype):
            return plain(self, *map(widened, gradients))

    return apply


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
    assigned = {each.argval for each in instructions if each.opname.startswith("STORE")}
    failed = next(each for each in instructions if each.offset == trace.tb_lasti)
    if failed.opname != "RAISE_VARARGS" or failed.positions is None or failed.positions.lineno is None:
        return False
    start, end = failed.positions.lineno, failed.positions.end_lineno or failed.positions.lineno
    for each in instructions:
        if each.positions is None or not start <= (each.positions.lineno or 0) <= end:
            continue
        if each.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"):
            return True
        if "CALL" in each.opname or each.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            return False
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith("LOAD_FAST") and not arguments.difference(assigned).issuperset(names):
            return False
    return False


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
        if tensor.requires_grad and not is_tracked:
            wide[position] = _wide(tensor)
        else:
            again = view.of(wide[view.base])
            wide[position] = again if tensor.requires_grad == is_tracked else again.detach()
    return wide


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _wide(tensor: Tensor) -> Tensor:
    """The tensor as fp32; what is expanded stays so."""
    if not _is_strided(tensor) or 0 not in tensor.stride():
        return tensor.float()
    once = tuple([slice(0, 1 if stride == 0 else None) for stride in tensor.stride()])
    return tensor[once].float().expand(tensor.shape)
