"""Convolution weights in channels_last layout, which oneDNN and cuDNN use without reordering."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event


class ChannelsLast:
    """Converts each model at its first call. The results of convolutions follow the layout of their weights."""

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def needs_conversion(self, module: nn.Module) -> bool:
        """Whether this is the first call of a model with two-dimensional convolutions. Effect: remembers the model."""
        if module in self._seen:
            return False
        self._seen.add(module)
        return any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in module.modules())

    def first_call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """The result of the call with the weights in channels_last layout.

        If the call fails (because the model views a result as contiguous, for example), the weights get their old
        layout back and the model is called again with the same random numbers.
        """
        name, state = type(module).__name__, torch.get_rng_state()
        module.to(memory_format=torch.channels_last)
        try:
            result = call()
        except RuntimeError as error:
            module.to(memory_format=torch.contiguous_format)
            torch.set_rng_state(state)
            degraded(self._settings, "channels_last", f"{name} does not support channels_last: {error}")
            return call()
        report_event("applied", setting="channels_last", detail=name)
        return result
