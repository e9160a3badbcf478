"""Gradients and optimizer state in the memory order of parameters whose order has changed.

A fused step on the CPU pairs the elements of a parameter, its gradient and its state by their place in memory. It gives
wrong results, without an error, if only the parameter is converted to channels_last. Seen with torch 2.13, AdamW with
fused=True.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.owners import is_held_elsewhere

_installed: list[bool] = []


@record
class _Held:
    """A parameter's gradient, the copy in its place, and the version of that when it was made."""

    parameter: Tensor
    gradient: Tensor
    copied: Tensor
    version: int


_held: weakref.WeakKeyDictionary[Any, list[_Held]] = weakref.WeakKeyDictionary()
"""By optimizer, the gradients that are copies during a step."""


def align_optimizers() -> None:
    """Effect: before each optimizer step, gradients and state of four-dimensional parameters get their order.

    For LBFGS, gradients get the order of their elements, because it puts views of them side by side.
    """
    if not _installed:
        register_optimizer_step_pre_hook(_align)
        register_optimizer_step_post_hook(_give_back)
        gather = getattr(torch.optim.LBFGS, GATHER, None)
        if gather is not None:
            setattr(torch.optim.LBFGS, GATHER, _of_contiguous(gather))
        _installed.append(True)


GATHER = "_gather_flat_grad"
"""The method that raises an error for gradients in another order. Source: torch/optim/lbfgs.py."""


def _of_contiguous(gather: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    @wraps(gather)
    def gathered(optimizer: Any) -> Tensor:
        for parameter in optimizer._params:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and not gradient.is_contiguous():
                parameter.grad = gradient.contiguous()
        return gather(optimizer)

    return gathered


def _align(optimizer: Any, *_: Any) -> None:
    _give_back(optimizer)  # The step before may have failed.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 4 and parameter.layout is torch.strided:
                _align_gradient(optimizer, parameter)
                _align_state(parameter, optimizer.state.get(parameter, {}))


def _align_gradient(optimizer: Any, parameter: Tensor) -> None:
    """Effect: the gradient gets the order: for the step only, if the program holds its memory, as of a flat buffer."""
    gradient = parameter.grad
    if gradient is None or not _differs(gradient, parameter):
        return
    if type(gradient) is Tensor and not is_held_elsewhere(gradient):
        gradient.data = _ordered(gradient, parameter)  # The program may hold the tensor itself.
        return
    copied = _ordered(gradient, parameter)
    held = _Held(parameter=parameter, gradient=gradient, copied=copied, version=_version(copied))
    _held.setdefault(optimizer, []).append(held)
    parameter.grad = copied


def _give_back(optimizer: Any, *_: Any) -> None:
    """Effect: parameters have the gradients again that the program gave them, with what has been written since.

    A closure, or a hook of the step, may have taken them away, made others, or set them to zero.
    """
    for held in _held.pop(optimizer, ()):
        if held.parameter.grad is not held.copied:
            continue
        if _version(held.copied) != held.version:
            with torch.no_grad():
                held.gradient.copy_(held.copied)
        held.parameter.grad = held.gradient


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _align_state(parameter: Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if _differs(value, parameter):
            state[name] = _ordered(value, parameter)


def _differs(value: Any, parameter: Tensor) -> bool:
    """Whether a tensor of the parameter's shape has another order in memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape != parameter.shape:
        return False
    return value.stride() != parameter.stride()


def _ordered(value: Any, parameter: Tensor) -> Tensor:
    """A copy of the tensor in the parameter's order."""
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value.detach())
