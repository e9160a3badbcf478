"""torch's optimizers in one pass over each parameter, where the program leaves the choice of implementation to torch.

What is replaced are the functions that compute a step, not the optimizers: their arguments, groups, state, checkpoints
and subclasses stay what they are, and every step is judged by the tensors that it is about.
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
    """A function that computes a step: its module, its name, and whether its last list holds the numbers of steps."""

    module: str
    name: str
    counts: bool


STEPS = (
    Step("torch.optim.adam", "adam", True),
    Step("torch.optim.adamw", "adamw", True),
    Step("torch.optim.sgd", "sgd", False),
    Step("torch.optim.adagrad", "adagrad", True),
)
IMPLEMENTATIONS = ("fused", "foreach", "grad_scale", "found_inf")
"""Arguments with which a program or a GradScaler has chosen how a step is computed, if they are given."""

DEMANDS = ("capturable", "differentiable", "has_complex")
"""Flags for which the fused step on the CPU is not made."""

NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "lr_decay")
FLAGS = ("amsgrad", "maximize", "nesterov")
"""Arguments of which the fused step takes numbers and bools only, and the other whatever can be computed with."""

DTYPES = (torch.float32, torch.float64)
"""In lower precision the fused step rounds once and the other after each operation: more than rounding may differ."""

LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
COUNT = (torch.float32, "cpu")


def install(settings: TorchSettings) -> str:
    """Effect: steps are fused where they can be. Raises: RuntimeError if this torch has no such step for the CPU."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    if "cpu" not in _get_fused_kernels_supported_devices():
        raise RuntimeError("this torch has no fused optimizers for the CPU")
    import_module("torch.optim._functional")  # torch.distributed's scripted optimizers compile the plain functions.
    count_fused_writes()
    plain = [getattr(import_module(step.module), step.name) for step in STEPS]
    for step, function in zip(STEPS, plain, strict=True):
        setattr(import_module(step.module), step.name, _fusing(step, function, settings))
    return "Adam, AdamW, SGD and Adagrad step through each parameter once"


def _fusing(step: Step, plain: Callable[..., None], settings: TorchSettings) -> Callable[..., None]:
    said: set[str] = set()

    @wraps(plain)
    def fusing(*lists: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():
            return plain(*lists, **named)
        try:
            obstacle = _obstacle(step, lists, named) if _is_ours(lists, named) else None
        except Exception as error:  # noqa: BLE001 - the program gets the step it wrote
            obstacle = f"{type(error).__name__}: {error}"
        if obstacle == "":
            named |= {flag: bool(named[flag]) for flag in FLAGS if flag in named} | {"fused": True}
        elif obstacle and obstacle not in said:
            said.add(obstacle)
            degraded(settings, "fused_optimizers", f"{step.name} stays as it is: {obstacle}")
        return plain(*lists, **named)

    return fusing


def _is_ours(lists: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether the program leaves the choice to torch, and the tensors are dense ones on the CPU."""
    if any(named.get(name) is not None for name in IMPLEMENTATIONS):
        return False
    if any(named.get(name) is not None and named[name] is not False for name in DEMANDS) or _is_differentiated():
        return False
    if not lists or not all(isinstance(each, list) for each in lists) or not lists[0]:
        return False
    return all(tensor.device.type == "cpu" for tensor in lists[0]) and not any(map(_is_half_new, lists))


def _is_differentiated() -> bool:
    """Whether derivatives of the step itself may be wanted, or it is mapped: torch has none of the fused step.

    `torch.optim.SGD(differentiable=True)` shows by this alone.
    """
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return torch.is_grad_enabled() or forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def _is_half_new(values: Sequence[Tensor | None]) -> bool:
    """Whether some parameters have no state yet, while others have: the fused step knows a first step for all only."""
    return len({value is None for value in values}) > 1


def _obstacle(step: Step, lists: Sequence[list[Any]], named: dict[str, Any]) -> str:
    """Why these tensors cannot be updated by the fused step; empty if they can.

    Source: pytorch/aten/src/ATen/native/cpu/FusedAdamKernel.cpp and its like for SGD and Adagrad: elements are taken
    in memory order, whatever the strides, and in the type of the parameter; numbers of steps are fp32.
    """
    for name in NUMBERS:
        if isinstance(value := named.get(name, 0), bool) or not isinstance(value, int | float):
            return f"its {name} is a {type(value).__name__}"
    if step.counts and any((count.dtype, count.device.type) != COUNT for count in lists[-1]):
        return "it does not count steps in float32 on the CPU"
    if step.counts and len(set(map(id, lists[-1]))) != len(lists[-1]):
        return "a parameter is there twice"
    others = lists[1:-1] if step.counts else lists[1:]
    for number, parameter in enumerate(lists[0]):
        obstacle = _unlike(parameter, [each[number] for each in others if each and each[number] is not None])
        if obstacle:
            return obstacle
    return ""


def _unlike(parameter: Tensor, others: Iterable[Tensor]) -> str:
    """What keeps a parameter with this gradient and state from being updated in memory order; empty if nothing."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"a parameter is a {type(parameter).__name__}"
    if parameter.dtype not in DTYPES:
        return f"parameters are {str(parameter.dtype).removeprefix('torch.')}"
    layout = next((layout for layout in LAYOUTS if parameter.is_contiguous(memory_format=layout)), None)
    for tensor in others:
        if tensor.layout is not torch.strided:
            return "gradients are sparse"
        if tensor.is_neg():
            return "gradients are views that negate"
        if (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
            return "a gradient or its state has another type or shape than the parameter"
        if layout is None or not tensor.is_contiguous(memory_format=layout):
            return "a parameter, its gradient and its state are not in the same memory order"
    return ""
