"""Fused kernels for torch's optimizers, where the program leaves the choice of implementation to torch.

The functions that compute a step are replaced, not the optimizers: arguments, groups, state, checkpoints and subclasses
do not change. Whether a step can be fused is decided at every step, by its tensors.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.tensors.versions import count_fused_writes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any


@record(kw_only=False)
class Step:
    """A function that computes a step: its module, its name, and whether its last list holds the step counts."""

    module: str
    name: str
    has_step_counts: bool


STEPS = (
    Step("torch.optim.adam", "adam", True),
    Step("torch.optim.adamw", "adamw", True),
    Step("torch.optim.sgd", "sgd", False),
    Step("torch.optim.adagrad", "adagrad", True),
)
IMPLEMENTATIONS = ("fused", "foreach", "grad_scale", "found_inf")
"""Arguments by which a program or a GradScaler chooses how a step is computed."""

UNSUPPORTED_FLAGS = ("capturable", "differentiable", "has_complex")
"""Flags that the fused step on the CPU does not support."""

NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "lr_decay")
FLAGS = ("amsgrad", "maximize", "nesterov")
"""Arguments that must be plain numbers (NUMBERS) or bools (FLAGS) in the fused step; other steps accept more types."""

DTYPES = (torch.float32, torch.float64)
"""In lower precision the fused step rounds once, others after each operation: results would differ too much."""

LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
STEP_COUNT = (torch.float32, "cpu")


def install(settings: TorchSettings) -> str:
    """Effect: optimizer steps use fused kernels where possible. Raises: RuntimeError if torch has none for the CPU."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    if "cpu" not in _get_fused_kernels_supported_devices():
        raise RuntimeError("this torch has no fused optimizers for the CPU")
    import_module("torch.optim._functional")  # torch.distributed's scripted optimizers compile the plain functions.
    count_fused_writes()
    plain = [getattr(import_module(step.module), step.name) for step in STEPS]
    for step, function in zip(STEPS, plain, strict=True):
        setattr(import_module(step.module), step.name, _fusing(step, function, settings))
    return "Adam, AdamW, SGD and Adagrad use fused kernels"


def _fusing(step: Step, plain: Callable[..., None], settings: TorchSettings) -> Callable[..., None]:
    warned_of: set[str] = set()

    @wraps(plain)
    def fusing(*lists: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():
            return plain(*lists, **named)
        try:
            obstacle = _obstacle(step, lists, named) if _is_left_to_torch(lists, named) else None
        except Exception as error:  # noqa: BLE001 - the program gets the unfused step
            obstacle = f"{type(error).__name__}: {error}"
        if obstacle == "":
            named |= {flag: bool(named[flag]) for flag in FLAGS if flag in named} | {"fused": True}
        elif obstacle and obstacle not in warned_of:
            warned_of.add(obstacle)
            degraded(settings, "fused_optimizers", f"{step.name} is not fused: {obstacle}")
        return plain(*lists, **named)

    return fusing


def _is_left_to_torch(lists: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether the program leaves the implementation to torch and all parameters are on the CPU."""
    if any(named.get(name) is not None for name in IMPLEMENTATIONS):
        return False
    if (
        any(named.get(name) is not None and named[name] is not False for name in UNSUPPORTED_FLAGS)
        or _is_differentiated()
    ):
        return False
    if not lists or not all(isinstance(each, list) for each in lists) or not lists[0]:
        return False
    return all(tensor.device.type == "cpu" for tensor in lists[0]) and not any(map(_is_partly_initialized, lists))


def _is_differentiated() -> bool:
    """Whether the step itself may be differentiated or vectorized by vmap, which the fused step does not support.

    `torch.optim.SGD(differentiable=True)` can be recognized only by this.
    """
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return torch.is_grad_enabled() or forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def _is_partly_initialized(values: Sequence[Tensor | None]) -> bool:
    """Whether only some parameters have state: the fused step takes a first step for all parameters or for none."""
    return len({value is None for value in values}) > 1


def _obstacle(step: Step, lists: Sequence[list[Any]], named: dict[str, Any]) -> str:
    """Why these tensors cannot be updated by the fused step; empty if they can.

    Source: pytorch/aten/src/ATen/native/cpu/FusedAdamKernel.cpp, and the kernels of SGD and Adagrad: they read elements
    in memory order, whatever the strides, and in the type of the parameter; step counts are fp32.
    """
    for name in NUMBERS:
        if isinstance(value := named.get(name, 0), bool) or not isinstance(value, int | float):
            return f"its {name} has type {type(value).__name__}"
    if step.has_step_counts and any((count.dtype, count.device.type) != STEP_COUNT for count in lists[-1]):
        return "its step count is not float32 on the CPU"
    if step.has_step_counts and len(set(map(id, lists[-1]))) != len(lists[-1]):
        return "a parameter is listed twice"
    others = lists[1:-1] if step.has_step_counts else lists[1:]
    for index, parameter in enumerate(lists[0]):
        obstacle = _layout_obstacle(parameter, [each[index] for each in others if each and each[index] is not None])
        if obstacle:
            return obstacle
    return ""


def _layout_obstacle(parameter: Tensor, others: Iterable[Tensor]) -> str:
    """Why a parameter with this gradient and state cannot be updated in memory order; empty if it can."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"a parameter has type {type(parameter).__name__}"
    if parameter.dtype not in DTYPES:
        return f"parameters are {str(parameter.dtype).removeprefix('torch.')}"
    layout = next((layout for layout in LAYOUTS if parameter.is_contiguous(memory_format=layout)), None)
    for tensor in others:
        if tensor.layout is not torch.strided:
            return "gradients are sparse"
        if tensor.is_neg():
            return "gradients are negated views"
        if (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
            return "a gradient or its state has another type or shape than the parameter"
        if layout is None or not tensor.is_contiguous(memory_format=layout):
            return "a parameter, its gradient and its state have different memory layouts"
    return ""
