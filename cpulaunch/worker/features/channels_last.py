"""Convolution weights in channels_last layout, which oneDNN and cuDNN use without reordering."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter as _clock
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.optimizer_layout import align_optimizers
from cpulaunch.worker.graph.precision import device_of
from cpulaunch.worker.ledger.blocks import LENGTH
from cpulaunch.worker.ledger.comparison import Comparison, Step
from cpulaunch.worker.ledger.signature import Signatures
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event


class ChannelsLast:
    """A trial for each model with two-dimensional convolutions. The results of convolutions follow their weights.

    Unless `measured`, models are converted at their first call, and stay so if they support it.
    """

    def __init__(self, settings: TorchSettings, *, measured: bool = True) -> None:
        self._settings = settings
        self._measured = measured
        self._trials: weakref.WeakKeyDictionary[nn.Module, LayoutTrial] = weakref.WeakKeyDictionary()

    def trial(self, module: nn.Module) -> LayoutTrial | None:
        """The trial that the calls of the module are part of; None if it has ended, or without such convolutions."""
        try:
            trial = self._trials.get(module)
        except TypeError:  # A class may compare its modules by value, so that they cannot be keys.
            return None
        if trial is None:
            is_measured = self._measured and device_of(module) == "cpu"
            trial = self._trials[module] = LayoutTrial(self._settings, measured=is_measured)
            trial.has_ended = not _can_convert(module)
        return None if trial.has_ended else trial


class LayoutTrial:
    """Calls of one model in its own layout, then with converted weights. It stays converted if that is faster.

    Calls in training are measured by whole steps, as in Chooser. Calls with other arguments or in another mode than the
    first one do not count. If a call fails with converted weights (because the model views a result as contiguous, for
    example), the weights get their old layout back and the model is called again with the same random numbers.
    """

    def __init__(self, settings: TorchSettings, *, measured: bool) -> None:
        self._settings = settings
        self._measured = measured
        self._signatures = Signatures()
        self._signature: Any = None
        self._comparison = Comparison()
        self._step_started: float | None = None
        self._is_proven = False
        self.has_ended = False

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The result of `run`, the call. Effect: converts the weights, or ends the trial, when it is time to."""
        if not self._measured:
            self._convert(module)
            self.has_ended = True
            return self._first_converted(module, run)
        started, is_step = _clock(), module.training and torch.is_grad_enabled()
        counts = self._is_alike((module.training, torch.is_grad_enabled(), self._signatures.of(args, kwargs)), is_step)
        self._end_step(module, started)
        if self._comparison.is_second and not self._is_proven and not self.has_ended:
            return self._first_converted(module, run)
        result = run()
        if counts and is_step:
            self._step_started = started
        elif counts:
            self._take(module, self._comparison.add(_clock() - started))
        self._take(module, self._comparison.pass_by())
        return result

    def _is_alike(self, signature: Any, is_step: bool) -> bool:
        """Whether a call is like the first one."""
        if self._signature is None:
            self._signature = signature
            self._comparison = Comparison(block=LENGTH if is_step else 1)
        return bool(signature == self._signature)

    def _end_step(self, module: nn.Module, now: float) -> None:
        started, self._step_started = self._step_started, None
        if started is not None:
            self._take(module, self._comparison.add(now - started))

    def _take(self, module: nn.Module, step: Step | None) -> None:
        """Effect: does the next step of the comparison."""
        if step is None or self.has_ended:
            return
        if step == "change":
            self._convert(module)
            return
        self.has_ended = True
        name = type(module).__name__
        own, converted = (f"{seconds * 1e3:.3g} ms" for seconds in self._comparison.estimates())
        if step == "keep":
            report_event("applied", setting="channels_last", detail=f"{name}: {converted}, {own} before")
            return
        if self._comparison.is_second:
            self._return(module)
        report_event("eager", module=name, reason=f"channels_last is not faster: {converted}, its own layout {own}")

    def _first_converted(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        name, state = type(module).__name__, torch.get_rng_state()
        try:
            result = run()
        except RuntimeError as error:
            self.has_ended = True
            self._return(module)
            torch.set_rng_state(state)
            degraded(self._settings, "channels_last", f"{name} does not support channels_last: {error}")
            return run()
        self._is_proven = True
        if self.has_ended:
            report_event("applied", setting="channels_last", detail=name)
        return result

    def _convert(self, module: nn.Module) -> None:
        try:
            align_optimizers(_weights(module))
            module.to(memory_format=torch.channels_last)
        except Exception as error:  # noqa: BLE001  The program continues with the layout that it has.
            self.has_ended = True
            degraded(self._settings, "channels_last", f"{type(module).__name__} cannot be converted: {error}")

    @staticmethod
    def _return(module: nn.Module) -> None:
        module.to(memory_format=torch.contiguous_format)


def _weights(module: nn.Module) -> list[Tensor]:
    """The parameters that a conversion reorders."""
    return [parameter for parameter in module.parameters() if parameter.dim() == 4]


def _can_convert(module: nn.Module) -> bool:
    """Whether the module has two-dimensional convolutions, none of which the program itself has converted."""
    with suppress(Exception):  # A class may override `modules` or `parameters`.
        if any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in module.modules()):
            return all(weight.is_contiguous() for weight in _weights(module))
    return False
