"""Wraps calls of modules: applies settings around each top-level call of a model, without changes to the program."""

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
_frames: Any = torch._C._dynamo.eval_frame
_is_grad_enabled = torch.is_grad_enabled
"""Looked up once: the weights of a call evict other data from the CPU caches, which makes lookups slow."""


def _swapped_callback() -> Any:
    """The callback with which torch.compile handles the frames of this thread."""
    callback = _frames.set_eval_frame(None)
    _frames.set_eval_frame(callback)
    return callback


_eval_frame_callback = getattr(_frames, "get_eval_frame_callback", _swapped_callback)
"""torch 2.5 returns its callback only in exchange for another."""


def install(settings: TorchSettings, *, first_call: Callable[[], None] | None = None) -> str:
    """The scope of the settings, in a few words. Effect: replaces nn.Module.__call__.

    `first_call` is called once, before the first top-level call.
    """
    original: Any = nn.Module.__call__
    wrapper = CallWrapper(settings, original, first_call)
    state = wrapper.state

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if state.unwrapped:
            return original(self, *args, **kwargs)
        return wrapper.call(self, args, kwargs)

    _hide_from_dynamo(__call__)
    nn.Module.__call__ = __call__
    for name, detail in _details(settings, capturing=wrapper.capturing):
        report_event("applied", setting=name, detail=detail)
    return "applies to top-level module calls"


def _details(settings: TorchSettings, *, capturing: bool) -> Iterator[tuple[str, str]]:
    """Name and description of each setting that is in force."""
    if capturing:
        yield "graph", settings.graph
    if settings.precision in DTYPES:
        yield "precision", f"autocast to {settings.precision} in top-level module calls, results in fp32"
    if settings.inference_mode:
        yield "inference_mode", "no gradients in top-level calls of modules in eval mode"


class _CallDepth(threading.local):
    """State of a thread. `inside`: it is in a top-level call. `unwrapped`: calls of modules run without the wrapper."""

    inside = False
    unwrapped = False


def _captures(settings: TorchSettings, precision: Precision) -> Any:
    """The captures of the process; None without --graph, or if the engine is unavailable."""
    if settings.graph == "off":
        return None
    try:
        from cpulaunch.worker.graph import engines

        return engines.captures(settings, precision)
    except Exception as error:  # noqa: BLE001  The program continues without this setting.
        degraded(settings, "graph", f"{settings.graph} is unavailable: {error}")
        return None


class CallWrapper:
    """Applies the settings to calls of modules."""

    def __init__(self, settings: TorchSettings, original: Any, first_call: Callable[[], None] | None) -> None:
        self.state = _CallDepth()
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
        """Whether --graph is in force."""
        return self._captures is not None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a top-level call, or of a call inside a module that could not be captured."""
        if _must_run_unwrapped(module):
            return self._original(module, *args, **kwargs)
        if self.state.inside:
            return self._submodule_call(module, args, kwargs)
        if self._first_call is not None:
            first, self._first_call = self._first_call, None
            first()
        self.state.inside = True
        try:
            return self._top_level(module, args, kwargs)
        finally:
            self.state.inside = False

    def _top_level(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._settings.inference_mode and _is_grad_enabled() and not module.training:
            with torch.no_grad():
                return self._with_layout(module, args, kwargs)
        return self._with_layout(module, args, kwargs)

    def _with_layout(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layout is not None and self._layout.needs_conversion(module):
            return self._layout.first_call(module, lambda: self._captured(module, args, kwargs))
        return self._captured(module, args, kwargs)

    def _captured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._captures is None:
            return self._eager(module, args, kwargs, try_submodules=False)
        return self._capturing(
            module,
            args,
            kwargs,
            lambda try_submodules: self._eager(module, args, kwargs, try_submodules=try_submodules),
            outermost=True,
        )

    def _submodule_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call inside a module that could not be captured as a whole."""
        if not self._captures.is_large_enough(module):
            return self._run(module, args, kwargs, try_submodules=True)
        return self._capturing(
            module,
            args,
            kwargs,
            lambda try_submodules: self._run(module, args, kwargs, try_submodules=try_submodules),
            outermost=False,
        )

    def _capturing(self, module: nn.Module, args: Any, kwargs: Any, eager: Any, *, outermost: bool) -> Any:
        before, self.state.unwrapped = self.state.unwrapped, True
        try:
            return self._captures.call(module, args, kwargs, eager, outermost=outermost)
        finally:
            self.state.unwrapped = before

    def _eager(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, try_submodules: bool) -> Any:
        with ExitStack() as contexts:
            mode = self._precision.enter(contexts, module)
            result = self._run(module, args, kwargs, try_submodules=try_submodules)
        return widened(result) if mode.widen else result

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, try_submodules: bool) -> Any:
        before, self.state.unwrapped = self.state.unwrapped, not try_submodules
        try:
            return self._original(module, *args, **kwargs)
        finally:
            self.state.unwrapped = before


def _must_run_unwrapped(module: nn.Module) -> bool:
    """Whether tracing, compiling, a function transform or a dispatch mode must see the original call."""
    if _tracing_state() is not None or _is_compiling():
        return True
    if _dispatch_modes() or _transforms() is not None:
        return True
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    callback = _eval_frame_callback()
    return bool(callback) or type(module).__name__ == "OptimizedModule"


def _hide_from_dynamo(function: Any) -> None:
    """Effect: the program's own torch.compile skips this function and compiles what it calls."""
    if hasattr(_frames, "skip_code"):  # torch 2.5
        _frames.skip_code(function.__code__)
    elif hasattr(_frames, "set_code_exec_strategy"):
        skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, default))
