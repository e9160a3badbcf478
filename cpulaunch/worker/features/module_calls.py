"""Calls of modules: what is done around the outermost call of a program's model, without touching the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.precision import DTYPES, Precision, widened
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event

_tracing_state, _is_compiling = torch._C._get_tracing_state, torch.compiler.is_compiling
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_is_grad_enabled = torch.is_grad_enabled
"""Looked up once: a call's weights have driven what the next call looks up out of the CPU's caches."""


def install(settings: TorchSettings, *, first_call: Callable[[], None] | None = None) -> str:
    """What now happens at the calls of modules. Effect: nn.Module's __call__ is replaced.

    `first_call` is called once, before the first outermost call.
    """
    original: Any = nn.Module.__call__
    around = CallWrapper(settings, original, first_call)
    place = around.place

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if place.closed:
            return original(self, *args, **kwargs)
        return around.enter(self, args, kwargs)

    _hide_from_dynamo(__call__)
    nn.Module.__call__ = __call__
    for name, detail in _details(settings, capturing=around.capturing):
        report_event("applied", setting=name, detail=detail)
    return "outermost calls of modules"


def _details(settings: TorchSettings, *, capturing: bool) -> Iterator[tuple[str, str]]:
    """What is in force from here on, by setting."""
    if capturing:
        yield "graph", settings.graph
    if settings.precision in DTYPES:
        yield "precision", f"autocast to {settings.precision} around outermost calls of modules, results in fp32"
    if settings.inference_mode:
        yield "inference_mode", "no gradients in outermost calls of modules in eval mode"


class _CallDepth(threading.local):
    """Where this thread is: `inside` an outermost call; `closed`: nothing is done for what is called from here."""

    inside = False
    closed = False


def _captures(settings: TorchSettings, precision: Precision) -> Any:
    """The process's captures; None without, or where the engine cannot be had."""
    if settings.graph == "off":
        return None
    try:
        from cpulaunch.worker.graph import engines

        return engines.captures(settings, precision)
    except Exception as error:  # noqa: BLE001  The program goes on without this setting.
        degraded(settings, "graph", f"{settings.graph} cannot be used: {error}")
        return None


class CallWrapper:
    """What is done around a call."""

    def __init__(self, settings: TorchSettings, original: Any, first_call: Callable[[], None] | None) -> None:
        self.place = _CallDepth()
        self._settings = settings
        self._original = original
        self._first_call = first_call
        self._precision = Precision(settings.precision)
        self._captures: Any = _captures(settings, self._precision)
        self._layout: Any = None
        if settings.channels_last:
            from cpulaunch.worker.features.channels_last import ChannelsLast

            self._layout = ChannelsLast(settings)

    @property
    def capturing(self) -> bool:
        """Whether modules are captured."""
        return self._captures is not None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's result. It is outermost, or below a module that could not be captured."""
        if _is_transparent(module):
            return self._original(module, *args, **kwargs)
        if self.place.inside:
            return self._part(module, args, kwargs)
        if self._first_call is not None:
            first, self._first_call = self._first_call, None
            first()
        self.place.inside = True
        try:
            return self._outermost(module, args, kwargs)
        finally:
            self.place.inside = False

    def _outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._settings.inference_mode and _is_grad_enabled() and not module.training:
            with torch.no_grad():
                return self._laid_out(module, args, kwargs)
        return self._laid_out(module, args, kwargs)

    def _laid_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layout is not None and self._layout.changes(module):
            return self._layout.first_call(module, lambda: self._captured(module, args, kwargs))
        return self._captured(module, args, kwargs)

    def _captured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._captures is None:
            return self._eager(module, args, kwargs, opened=False)
        return self._capturing(
            module, args, kwargs, lambda opened: self._eager(module, args, kwargs, opened=opened), outermost=True
        )

    def _part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call below a module that could not be captured as a whole."""
        if not self._captures.worth_it(module):
            return self._run(module, args, kwargs, opened=True)
        return self._capturing(
            module, args, kwargs, lambda opened: self._run(module, args, kwargs, opened=opened), outermost=False
        )

    def _capturing(self, module: nn.Module, args: Any, kwargs: Any, eager: Any, *, outermost: bool) -> Any:
        before, self.place.closed = self.place.closed, True
        try:
            return self._captures.call(module, args, kwargs, eager, outermost=outermost)
        finally:
            self.place.closed = before

    def _eager(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, opened: bool) -> Any:
        with ExitStack() as contexts:
            mode = self._precision.enter(contexts, module)
            result = self._run(module, args, kwargs, opened=opened)
        return widened(result) if mode.widen else result

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, opened: bool) -> Any:
        before, self.place.closed = self.place.closed, not opened
        try:
            return self._original(module, *args, **kwargs)
        finally:
            self.place.closed = before


def _is_transparent(module: nn.Module) -> bool:
    """Whether this call is part of something that must see the module itself: tracing, compiling, transforms, modes."""
    if _tracing_state() is not None or _is_compiling():
        return True
    if _dispatch_modes() or _transforms() is not None:
        return True
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    callback = _eval_frame_callback()
    return bool(callback) or type(module).__name__ == "OptimizedModule"


def _hide_from_dynamo(function: Any) -> None:
    """Effect: a program's own torch.compile does not compile this function, but what it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # torch 2.5
        frames.skip_code(function.__code__)
    elif hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, default))
