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

from cpulaunch.worker.tensors.owners import is_held_elsewhere

_installed: list[bool] = []

_held: weakref.WeakKeyDictionary[Any, list[tuple[Tensor, Any]]] = weakref.WeakKeyDictionary()
"""By optimizer, parameters whose gradients are copies during a step, and the gradients that they have otherwise."""


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
    _held.setdefault(optimizer, []).append((parameter, gradient))
    parameter.grad = _ordered(gradient, parameter)


def _give_back(optimizer: Any, *_: Any) -> None:
    """Effect: parameters have the gradients again that the program gave them."""
    for parameter, gradient in _held.pop(optimizer, ()):
        if parameter.grad is not None:
            parameter.grad = gradient


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
