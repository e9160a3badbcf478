"""bf16 and fp16: autocast around a module's call, and results in the type the caller expects."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_unseen: Any = torch._C.DisableTorchFunction
"""A context in which reading a tensor's type and device is not seen by a program's torch function modes."""

LOW = tuple(DTYPES.values())


@record
class Mode:
    """Whether a call computes in low precision; whether its results go back to fp32: not where the program asked."""

    low: bool
    widen: bool


class Precision:
    """What `--precision` asks for: `dtype` None leaves autocast to the program."""

    def __init__(self, name: str | None) -> None:
        self.dtype = DTYPES.get(name or "")

    def enter(self, contexts: ExitStack, module: nn.Module, *, cache: bool = True) -> Mode:
        """How the call now runs. Effect: autocast is on until `contexts` closes, if it is to be.

        A program's own autocast is left as it is. `cache`: casts of weights may be kept meanwhile (not while tracing:
        they would be missing from the trace).
        """
        device = device_of(module)
        if not torch.amp.is_autocast_available(device):
            return Mode(low=False, widen=False)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if not cache:
                contexts.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            return Mode(low=dtype in LOW, widen=False)
        if self.dtype is None or is_low(module):
            return Mode(low=False, widen=False)
        contexts.enter_context(torch.autocast(device, dtype=self.dtype, cache_enabled=cache))
        return Mode(low=True, widen=True)


def device_of(module: nn.Module) -> str:
    """The type of device the module's first parameter or buffer is on; "cpu" without one."""
    with suppress(Exception), _unseen():  # A class may have a `parameters` of its own.
        for tensors in (module.parameters(), module.buffers()):
            for tensor in tensors:
                return tensor.device.type
    return "cpu"


def is_low(module: nn.Module) -> bool:
    """Whether the program itself keeps this module in a low precision: its first floating parameter says so."""
    with suppress(Exception), _unseen():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter.dtype in LOW
    return False


def widened(value: Any) -> Any:
    """The result with its bf16 and fp16 tensors as fp32, in the same structure; unknown objects stay as they are."""
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
