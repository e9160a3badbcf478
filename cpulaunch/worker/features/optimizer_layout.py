"""Gradients and optimizer state in the memory order of parameters whose order has changed.

A fused step on the CPU pairs the elements of a parameter, its gradient and its state by their place in memory. It gives
wrong results, without an error, if only the parameter is converted to channels_last. Seen with torch 2.13, AdamW with
fused=True.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

_converted: dict[int, weakref.ref[Tensor]] = {}
"""By address, the parameters whose order in memory has changed."""

_installed: list[bool] = []


def align_optimizers(parameters: Iterable[Tensor]) -> None:
    """Effect: before each optimizer step, gradients and state of these parameters get the parameters' order."""
    if not _installed:
        register_optimizer_step_pre_hook(_align)
        _installed.append(True)
    for parameter in parameters:
        _converted[id(parameter)] = weakref.ref(parameter)


def _align(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference = _converted.get(id(parameter))
            if reference is not None and reference() is parameter:
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
