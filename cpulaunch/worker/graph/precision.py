"""bf16 and fp16: autocast around a module's call, with results converted back to fp32."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record

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
        contexts.enter_context(torch.autocast(device, dtype=self.dtype, cache_enabled=cache))
        return Mode(low=True, widen=True)


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
    text = str(error)
    return isinstance(error, RuntimeError | TypeError) and any(name in text for name in (*LOW_NAMES, *NO_PRIMITIVE))


DTYPE_WORDS = ("float", "half", "dtype", "primitive")


def may_be_of_low_dtype(error: Exception) -> bool:
    """Whether an error of a call in bf16 or fp16 may be one of its types, also where the program checks them itself."""
    text = str(error).lower()
    return isinstance(error, AssertionError) or any(word in text for word in DTYPE_WORDS)


def widened(value: Any) -> Any:
    """The result with its bf16 and fp16 tensors as fp32, in the same structure; unknown objects are not converted."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten, rebuild

    tensors: list[Tensor] = []
    try:
        spec = flatten(value, tensors)
    except UnknownStructureError:
        return value
    if not any(tensor.dtype in LOW for tensor in tensors):
        return value
    return rebuild(spec, [tensor.float() if tensor.dtype in LOW else tensor for tensor in tensors])
