"""Convolution weights in channels_last order, which oneDNN and cuDNN compute without reordering."""

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
    """Which models have been looked at. Results of convolutions follow their weights' order, by themselves."""

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def changes(self, module: nn.Module) -> bool:
        """Whether this is a model's first call and it has two-dimensional convolutions."""
        if module in self._seen:
            return False
        self._seen.add(module)
        return any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in module.modules())

    def first_call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """The result of the call with the weights reordered.

        A model that cannot take the other order (it views a result as if it were contiguous) gets its own back and is
        called again, with the same random numbers.
        """
        name, state = type(module).__name__, torch.get_rng_state()
        module.to(memory_format=torch.channels_last)
        try:
            result = call()
        except RuntimeError as error:
            module.to(memory_format=torch.contiguous_format)
            torch.set_rng_state(state)
            degraded(self._settings, "channels_last", f"{name} fails with it: {error}")
            return call()
        report_event("applied", setting="channels_last", detail=name)
        return result
