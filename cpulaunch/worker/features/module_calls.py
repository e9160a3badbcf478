"""Wraps calls of modules: applies settings around each top-level call of a model, without changes to the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from random import Random
from time import perf_counter as _clock
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.call_modes import CallModes
from cpulaunch.worker.graph.dynamo import hide_from_dynamo
from cpulaunch.worker.graph.precision import DTYPES, place_of
from cpulaunch.worker.ledger.chooser import Chooser
from cpulaunch.worker.ledger.decision import PLAIN
from cpulaunch.worker.ledger.presence import Presence
from cpulaunch.worker.reporting.events import report_event, text_of
from cpulaunch.worker.tensors.references import ByIdentity

_tracing_state, _is_compiling = torch._C._get_tracing_state, torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_random = Random(0).random  # Not the program's.
_frames: Any = torch._C._dynamo.eval_frame
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
_graph_task = torch._C._current_graph_task_id
_saved_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None)
"""Looked up once: the weights of a call evict other data from the CPU caches, which makes lookups slow.

torch 2.5 does not tell which hooks are in force for the tensors that autograd saves.
"""


def _swapped_callback() -> Any:
    """The callback with which torch.compile handles the frames of this thread."""
    callback = _frames.set_eval_frame(None)
    _frames.set_eval_frame(callback)
    return callback


_eval_frame_callback = getattr(_frames, "get_eval_frame_callback", _swapped_callback)
"""torch 2.5 returns its callback only in exchange for another."""


def install(settings: TorchSettings, *, first_call: Callable[[], None] | None = None, measured: bool = True) -> str:
    """The scope of the settings, in a few words. Effect: replaces nn.Module.__call__.

    `first_call` is called once, before the first top-level call. `measured`: calls run in the mode that is fastest, as
    measured; without, always in the mode that is expected to be.
    """
    original: Any = nn.Module.__call__
    wrapper = CallWrapper(settings, original, first_call, measured=measured)
    replacement = _module_call(wrapper, original)
    nn.Module.__call__ = replacement
    if measured and not settings.inference_mode and settings.precision not in DTYPES:
        wrapper.chooser.presence = Presence(_exchange(replacement, original), _exchange(original, replacement))
    for name, detail in _details(settings, wrapper.modes):
        report_event("applied", setting=name, detail=detail)
    return "applies to top-level module calls"


def _exchange(old: Any, new: Any) -> Callable[[], bool]:
    """A function that lets `new` be nn.Module.__call__ in place of `old`, and returns whether it is.

    What the program has put there stays, as it may put back later what was there before.
    """

    def exchange() -> bool:
        if nn.Module.__call__ is old:
            nn.Module.__call__ = new
        return nn.Module.__call__ is new

    return exchange


def _module_call(wrapper: CallWrapper, original: Any) -> Any:
    """The function that replaces nn.Module.__call__.

    It costs little where the plugin does nothing: calls in a run of the chooser are only counted, those of short ones
    mostly without a clock, and all calls do what two functions of torch do without calling them.
    """
    state, runs, infers = wrapper.state, wrapper.chooser.runs, wrapper.infers
    is_torchs = _names(original) == TORCH_CALL
    impl = nn.Module._call_impl if _is_torchs_impl(nn.Module._call_impl) else None
    pre_backward, backward, forward, pre_forward = (getattr(torch_module, name, {}) for name in TORCH_CALL_IMPL[-4:])

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if _is_dynamo_compiling():  # Dynamo must not trace what follows.
            return original(self, *args, **kwargs)
        is_counted = not state.unwrapped
        is_to_infer = False
        started: Any = None
        run: Any = None
        if is_counted:
            training = self.__dict__.get("training") is True  # See _has_mode.
            grad = _is_grad_enabled()
            is_to_infer = infers and grad and not training and not state.inside
            run = runs.get((id(self), training, grad and not is_to_infer))
            if (
                run is None
                or (
                    run.left <= run.next_timed
                    and (run.until < (started := _clock()) or run.left <= 0 or run.seconds <= 0)
                )
                or (is_to_infer and _may_need_gradients(self))
            ):
                return wrapper.call(self, args, kwargs)
            run.left -= 1
            state.unwrapped = True
        try:
            if is_to_infer:
                _set_grad_enabled(False)
            if not is_torchs or self._compiled_call_impl is not None:
                return original(self, *args, **kwargs)
            if (
                (type(self)._call_impl is not impl or "_call_impl" in self.__dict__ or _tracing_state())
                or (self._backward_hooks or self._backward_pre_hooks or self._forward_hooks or self._forward_pre_hooks)
                or (pre_backward or backward or forward or pre_forward)
            ):
                return self._call_impl(*args, **kwargs)
            return self.forward(*args, **kwargs)
        finally:
            if is_counted:
                state.unwrapped = False  # First, as signals are handled after calls.
            if is_to_infer:
                _set_grad_enabled(True)
            if started is not None:
                run.seconds -= _clock() - started
                run.next_timed = run.left - int(run.spread * _random()) if run.spread else run.left

    __call__.__module__, __call__.__qualname__ = "torch.nn.modules.module", "Module.__call__"  # By which it is pickled.
    hide_from_dynamo(__call__)
    return __call__


TORCH_CALL = ("_compiled_call_impl", "_call_impl")
TORCH_CALL_IMPL = (
    *("_slow_forward", "forward", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks", "_forward_pre_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
)
TRACING = (("torch", "_C", "_get_tracing_state"), ("torch", "_C", "_is_tracing"))
"""The names used by nn.Module.__call__, and the first ones by what that calls, if they are torch's own functions: those
that ask whether it is tracing (the second ones from torch 2.15 on), then the others.

What is copied here is all that they do where there are no hooks, and nothing is traced. Source:
torch/nn/modules/module.py, Module._wrapped_call_impl and Module._call_impl.
"""


def _names(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _is_torchs_impl(function: Any) -> bool:
    names = _names(function)
    return names[:3] in TRACING and names[3 : 3 + len(TORCH_CALL_IMPL)] == TORCH_CALL_IMPL


def _details(settings: TorchSettings, modes: CallModes) -> Iterator[tuple[str, str]]:
    """Name and description of each setting that is in force."""
    if modes.captures is not None:
        yield "graph", settings.graph
    if modes.residents is not None and settings.weights is not None:
        yield "weights", f"{settings.weights} in calls of modules in eval mode"
    if settings.precision in DTYPES:
        yield "precision", f"autocast to {settings.precision} in top-level module calls, results in fp32"
    if settings.inference_mode:
        yield "inference_mode", "no gradients in top-level calls of modules in eval mode"


class _CallDepth(threading.local):
    """State of a thread. `inside`: it is in a top-level call. `unwrapped`: calls of modules run without the wrapper."""

    inside = False
    unwrapped = False


class CallWrapper:
    """Applies the settings to calls of modules: each top-level call runs once, in the mode that is chosen for it."""

    def __init__(
        self, settings: TorchSettings, original: Any, first_call: Callable[[], None] | None, *, measured: bool = True
    ) -> None:
        self.state = _CallDepth()
        self.infers = settings.inference_mode
        self._original = original
        self._first_call = first_call
        self.modes = CallModes(settings, original, self.state)
        self.chooser = Chooser(
            self.modes.candidates, self.modes.retire, measured=measured, is_guarded=self._is_guarded, place_of=place_of
        )
        self.modes.changed = self.chooser.restart
        if measured:
            self.modes.is_measured = True
            self.modes.fastest_but, self.modes.seconds_of = self.chooser.fastest_but, self.chooser.seconds
        if self.modes.captures is not None:
            self.modes.captures.seconds_of = self.chooser.seconds
        self._unreadable: set[str] = set()
        self._weightless: ByIdentity[bool] = ByIdentity()
        self._layout: Any = None
        if settings.channels_last:
            from cpulaunch.worker.features.channels_last import ChannelsLast

            self._layout = ChannelsLast(settings, self.chooser.restart, measured=measured)

    def _is_guarded(self, module: nn.Module) -> bool:
        """Whether each top-level call of the module must be seen, as its result may have another memory layout."""
        return self._layout is not None and bool(self._layout.guards(module))

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a top-level call, or of a call inside a module that could not be captured."""
        if _must_run_unwrapped(module):
            if self.chooser.presence is not None and _is_compiled(module):
                self.chooser.presence.see_other()  # torch.compile may compile it again where the wrapper is not there.
            return self._original(module, *args, **kwargs)
        if self.state.inside:
            return self.modes.run_submodule(module, args, kwargs)
        if self._first_call is not None:
            first, self._first_call = self._first_call, None
            first()
        self.state.inside = True
        try:
            return self._top_level(module, args, kwargs)
        finally:
            self.state.inside = False

    def _top_level(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_to_infer = self.infers and _is_grad_enabled() and not module.training
        if is_to_infer and _graph_task() == -1 and _saved_hooks(True) is None:  # A checkpoint needs gradients, twice.
            with torch.no_grad():
                return self._with_layout(module, args, kwargs)
        return self._with_layout(module, args, kwargs)

    def _with_layout(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_weightless(module) and module not in self._weightless:
            self._weightless[module] = True
            return self.modes.run_as_is(module, args, kwargs)
        is_checkpoint = _saved_hooks(True) is not None  # It saves the same tensors when it computes the call again.
        run = self.modes.run_as_is if is_checkpoint else self._measured
        is_backward = _graph_task() != -1  # A checkpoint computes again what was in another call, or had its trial.
        # A call that began while the wrapper was away may run in another thread, and a trial moves weights.
        was_away = self.chooser.presence is not None and self.chooser.presence.absences > 0
        trial = None if self._layout is None or is_backward or was_away else self._layout.trial(module)
        if trial is None:
            return run(module, args, kwargs)
        if self.chooser.presence is not None:
            self.chooser.presence.stay()
        if trial.has_ended:
            return trial.converted(module, args, kwargs, lambda: run(module, args, kwargs))
        run = run if is_checkpoint else self._in_trial
        return trial.call(module, args, kwargs, lambda: run(module, args, kwargs))

    def _in_trial(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that is part of a trial of layouts: always in one mode, without captured graphs."""
        if self.modes.needs_care(module, args, kwargs):
            return self.modes.first_call(module, args, kwargs)
        return self.modes.run(self.modes.in_trial(module), module, args, kwargs)

    def _measured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result in the chosen mode, whose duration decides about later calls.

        It includes what the plugin itself does for the call, except for a plain call, for which it soon does nothing,
        and except for a capture.
        """
        turn = unmeasured = unreadable = None
        try:
            needs_care = self.modes.needs_care(module, args, kwargs)
            started = _clock()
            unmeasured = None if needs_care else self.chooser.unmeasured(module, args, kwargs, started)
            turn = None if needs_care or unmeasured else self.chooser.turn(module, args, kwargs, started)
        except Exception as error:  # noqa: BLE001  A module may override what the choice reads of it.
            unreadable = text_of(error)  # Not the error, whose traceback would keep this frame and the arguments.
        if unreadable is not None:  # Not inside `except`: it would be the context of the program's own errors.
            self._report_unreadable(module, unreadable)
            return self.modes.run_as_is(module, args, kwargs)
        if self.chooser.presence is not None:
            self.chooser.tell(self.chooser.presence, turn, unmeasured, started)
        if turn is None:
            return self._unmeasured(unmeasured, module, args, kwargs)
        mode, modes, cost = turn.mode, self.modes, 0.0
        progress, waiting, preparing = modes.progress(), modes.pending(), modes.preparing_seconds()
        if mode == PLAIN:
            cost = (now := _clock()) - started
            started = now
        try:
            result = modes.run(mode, module, args, kwargs)
        except BaseException:
            self.chooser.fail(turn)
            raise
        now = _clock()
        steady, pending = modes.progress() == progress, modes.pending() != waiting
        seconds = max(0.0, now - started - (modes.preparing_seconds() - preparing))
        self.chooser.add(turn, seconds, now=now, steady=steady, pending=pending)
        if modes.is_over(module, mode):
            self.chooser.remove(module, mode)
        turn.spend(cost + _clock() - now)
        return result

    def _unmeasured(self, mode: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call whose duration does not count. `mode` None: a call that needs care."""
        if mode is not None:
            return self.modes.run(mode, module, args, kwargs)
        return self.modes.first_call(module, args, kwargs)

    def _report_unreadable(self, module: nn.Module, error: str) -> None:
        """Effect: reports once for each class that no mode can be chosen for its modules."""
        name = type(module).__name__
        if name not in self._unreadable:
            self._unreadable.add(name)
            report_event("eager", module=name, reason=f"no mode can be chosen: {error}")


def _has_mode(module: nn.Module) -> bool:
    """Whether the module has an ordinary training mode: torch.jit.freeze takes it away, and a class may compute it."""
    return isinstance(module.__dict__.get("training"), bool)


def _is_weightless(module: nn.Module) -> bool:
    """Whether a module is one of torch.nn itself without weights and parts, such as a loss.

    A program may make a new one for each call, for which a choice of modes and layouts would only cost time. None of
    these computes anything in which autocast makes a difference for fp32.
    """
    own = module.__dict__
    if own.get("_modules") or own.get("_parameters") or "forward" in own:
        return False
    if any(buffer is not None for buffer in own.get("_buffers", {}).values()):
        return False
    return str(type(module).__module__).startswith("torch.nn.modules.")


def _may_need_gradients(module: nn.Module) -> bool:
    """Whether the wrapper must find out if a call of the module in eval mode may run without gradients."""
    return _graph_task() != -1 or _saved_hooks(True) is not None or _must_run_unwrapped(module)


def _must_run_unwrapped(module: nn.Module) -> bool:
    """Whether tracing, compiling, a function transform, forward AD or a dispatch mode must see the original call, or it
    is unknown whether the module is in training mode.
    """
    if _tracing_state() is not None or _is_compiling() or not _has_mode(module):
        return True
    if _dispatch_modes() or _transforms() is not None or getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    return isinstance(module, torch.jit.ScriptModule) or _is_compiled(module)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile handles the call."""
    if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
        return True
    return bool(_eval_frame_callback())
