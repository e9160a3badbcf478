"""Which modules and calls may be captured, found out without tracing them: by their kind, and by limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.capture import Call, prepared_bytes
from cpulaunch.worker.reporting.events import report_event

MIN_WEIGHTED_PARTS = 2
"""A submodule is captured by itself only if it contains at least this many modules with weights."""

MAX_MODULES = 64
"""Limit of captured modules per process: each costs seconds and a copy of its weights."""

CAPTURE_RUNS = 13
"""Executions of a call in its capture, on its thread: to trace it 2, to compile its graph 2, to look at the results 4,
to time it against the graph 4, to verify the next call 1."""

DYNAMO_SECONDS = 2.0
"""The import of torch._dynamo, which the first capture of a process needs. Measured with torch 2.13 on an Intel
Xeon at 2.5 GHz: 2.2 to 2.5 s."""

SMALL_SECONDS = 0.5
"""Captures whose executions take less wait for nothing."""

PAID_SHARE = 0.5
"""The share of a larger capture's expected cost that the module's calls must have taken before it."""

FREE_SECONDS = 4.0
"""Seconds that the first captures of a process may take."""

SHARE = 0.005
"""The share of a process's time that further captures may take, besides what captures have saved."""


class Usage:
    """What the captures of a process take, within the limits of the settings.

    `bytes`: memory of their constants. `modules`: how many modules have captures. `seconds`: time spent on making
    captures, including those that failed. `saved`: time by which captured calls were shorter, as measured once.
    """

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self.bytes = 0
        self.modules = 0
        self.seconds = 0.0
        self.saved = 0.0
        self._started: float | None = None

    def affords_capture(self, now: float) -> bool:
        """Whether another capture may be made now: not while captures have cost the program more than they may.

        The first ones may, so that programs of one shape are soon faster; those of many shapes pay for each further
        capture with what the earlier ones have saved. `now`: the time, in seconds.
        """
        if self._started is None:
            self._started = now
        return self.seconds <= FREE_SECONDS + SHARE * (now - self._started) + self.saved

    def module_limit_reason(self, module: nn.Module | None) -> str | None:
        """Which limit a first capture of the module would exceed; None if none."""
        limit = self._settings.graph_memory_bytes
        if limit is not None and module is not None and self.bytes + prepared_bytes() + weight_bytes(module) > limit:
            return f"its frozen weights would exceed the limit of {limit >> 20} MiB for captures"
        return f"{MAX_MODULES} modules of this process are captured already" if self.modules >= MAX_MODULES else None

    def budget_reason(self) -> str | None:
        """Why nothing is captured any more: the captures have taken longer than allowed; None if they have not."""
        limit = self._settings.graph_budget
        if self.seconds < limit:
            return None
        return f"captures have taken {self.seconds:.3g} s of the {limit:g} s that --graph-budget allows"

    def add_seconds(self, seconds: float) -> None:
        """Effect: counts and reports the time that a capture has taken."""
        self.seconds += seconds
        report_event("captures", seconds=round(self.seconds, 3), budget=self._settings.graph_budget)


def is_too_early(call_seconds: float, spent: float, *, imports: bool) -> bool:
    """Whether a module has not been called for long enough to be captured for the first time.

    `call_seconds`: of an eager call; `spent`: of the module's calls so far; `imports`: Dynamo must be imported.
    A program that ends sooner pays nothing. In any other, the executions and the import of a first capture take no
    longer than the calls before it divided by PAID_SHARE, unless the executions take less than SMALL_SECONDS. Dynamo
    and the compiler take seconds besides, whose number is not known beforehand; see Usage.affords_capture.
    """
    executions = CAPTURE_RUNS * call_seconds
    return executions > SMALL_SECONDS and spent < PAID_SHARE * (executions + DYNAMO_SECONDS * imports)


def not_capturable_reason(module: nn.Module) -> str | None:
    """Why no call of this module can be captured at the moment, whatever its arguments; None if one can."""
    if module.training:
        return "it is in training mode"
    if torch.is_grad_enabled():
        return "gradients are enabled (add torch.no_grad(), or use --inference-mode)"
    if any((torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)):
        return "global forward hooks are registered"
    if torch._C._len_torch_function_stack() and _has_function_mode():
        return "a torch function mode is active"
    return None


def _has_function_mode() -> bool:
    """Whether a torch function mode other than that of `torch.set_default_device` is active."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)


def uses_other_device(call: Call) -> bool:
    """Whether an argument, parameter or buffer is on a device other than the CPU."""
    tensors = (*call.inputs, *call.module.parameters(), *call.module.buffers())
    return any(tensor.device.type != "cpu" for tensor in tensors)


def weight_bytes(module: nn.Module) -> int:
    """Bytes that freezing a module may take: one packed copy of its weights."""
    with suppress(NotImplementedError):
        return sum(tensor.untyped_storage().nbytes() for tensor in module.parameters())
    return 0


def has_weighted_parts(module: nn.Module) -> bool:
    """Whether a submodule contains enough modules with weights for a capture of its own."""
    weighted_parts = 0
    for part in parts_of(module):
        weighted_parts += any(value is not None for value in part._parameters.values())
        if weighted_parts >= MIN_WEIGHTED_PARTS:
            return True
    return False


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its submodules, as far as they can be listed: a class may override `modules`."""
    with suppress(Exception):
        yield from module.modules()
