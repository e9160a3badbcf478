"""Gradients and optimizer state in the memory order of parameters whose order has changed.

A fused step on the CPU pairs the elements of a parameter, its gradient and its state by their place in memory. It gives
wrong results, without an error, if only the parameter is converted to channels_last. Seen with torch 2.13, AdamW with
fused=True.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

_installed: list[bool] = []


def align_optimizers() -> None:
    """Effect: before each optimizer step, gradients and state of four-dimensional parameters get their order."""
    if not _installed:
        register_optimizer_step_pre_hook(_align)
        _installed.append(True)


def _align(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 4 and parameter.layout is torch.strided:
                _align_parameter(parameter, optimizer.state.get(parameter, {}))


def _align_parameter(parameter: Tensor, state: dict[str, Any]) -> None:
    if _differs(parameter.grad, parameter):
        parameter.grad = _ordered(parameter.grad, parameter)
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
