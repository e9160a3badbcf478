"""Convolution weights in channels_last layout, which oneDNN and cuDNN use without reordering."""

from __future__ import annotations

import dis
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter as _clock
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.hooks import has_hooks, watch_hooks
from cpulaunch.worker.features.optimizer_layout import align_optimizers
from cpulaunch.worker.graph.eligibility import parts_of
from cpulaunch.worker.ledger.blocks import LENGTH
from cpulaunch.worker.ledger.comparison import Comparison, Step
from cpulaunch.worker.ledger.signature import Signatures
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event, text_of
from cpulaunch.worker.tensors import mutation
from cpulaunch.worker.tensors.owners import free_left_memory, is_own, may_move, reorder
from cpulaunch.worker.tensors.parameter_views import watch_views
from cpulaunch.worker.tensors.pytree import contiguous, tensors_of
from cpulaunch.worker.tensors.references import ByIdentity

DRAIN_SECONDS = 10.0
"""So long threads wait for the end of others' calls, which may themselves wait for theirs."""

LAYOUT_WORDS = ("stride", "contiguous", "view", "layout", "channels", "format")
"""One of these is in the message of an error of a program that checks the layout of a tensor itself."""


class ChannelsLast:
    """A trial for each model with two-dimensional convolutions. The results of convolutions follow their weights.

    Unless `measured`, models are converted at their first call, and stay so if they support it. `restart` is called
    with each module for which this class must see the next call.
    """

    def __init__(self, settings: TorchSettings, restart: Callable[[nn.Module], None], *, measured: bool = True) -> None:
        self._settings = settings
        self._restart = restart
        self._measured = measured
        watch_hooks(self._hooked)
        watch_views(self._viewed)
        self._trials: ByIdentity[LayoutTrial] = ByIdentity()

    def trial(self, module: nn.Module) -> LayoutTrial | None:
        """The trial that the calls of the module are part of; None if it stays, or is again, in its own layout."""
        free_left_memory()
        trial = self._trials.get(module)
        if trial is None:
            trial = LayoutTrial(self._settings, self, measured=self._measured)
            trial.has_ended = not _can_convert(module)
            trial.shares = any(other.is_converted for _, other in self.others(module))
            trial = self._trials.setdefault(module, trial)  # Another thread may have been faster.
        if trial.is_left and all(weight.is_cpu for weight in _weights(module)):  # The model has come back.
            trial.withdraw(module, is_viewed=True)
        return None if trial.has_ended and not (trial.is_converted or trial.shares) else trial

    def guards(self, module: nn.Module) -> bool:
        """Whether calls of the module may run with converted weights, so that each of their results is looked at."""
        trial = self._trials.get(module)
        return trial is not None and (trial.is_converted or trial.is_left or trial.shares)

    def others(self, module: nn.Module) -> list[tuple[nn.Module, LayoutTrial]]:
        """The modules with a trial that have weights of this one: parts of it that the program calls by themselves, or
        what it is a part of.
        """
        ids = set(map(id, _weights_if_known(module)))
        if not ids:
            return []
        others = [each for each in self._trials.items() if each[0] is not module]
        return [each for each in others if not ids.isdisjoint(map(id, _weights_if_known(each[0])))]

    def share(self, module: nn.Module) -> None:
        """Effect: calls of others that have weights of this module, which are about to be converted, are guarded."""
        for other, trial in self.others(module):
            trial.shares = trial.has_ended = True
            self._restart(other)

    def _hooked(self, part: nn.Module | None) -> None:
        """Effect: models with this part (None: all) get their layout back: a hook sees what is inside of them."""
        for module, trial in self._trials.items():
            if trial.is_converted and (part is None or any(each is part for each in parts_of(module))):
                trial.withdraw(module)

    def _viewed(self, parameter: Tensor) -> None:
        """Effect: the model of this parameter gets its layout back: the program views it as contiguous."""
        for module, trial in self._trials.items():
            if (trial.is_converted or trial.is_left) and any(weight is parameter for weight in _weights(module)):
                trial.withdraw(module, is_viewed=True)


class LayoutTrial:
    """Calls of one model in its own layout, then with converted weights. It stays converted if that is faster.

    Calls in training are measured by whole steps, as in Chooser. Calls with other arguments or in another mode than the
    first one do not count. If a call fails with converted weights (because the model views a result as contiguous, for
    example), the weights get their old layout back and the model is called again with the same random numbers and the
    same running statistics. So they do if a result that the program sees has another layout than before, and if several
    threads call the model.
    """

    def __init__(self, settings: TorchSettings, trials: ChannelsLast, *, measured: bool) -> None:
        """`shares`: weights of the module may have been converted for another one, with a trial of its own."""
        self._settings = settings
        self._trials = trials
        self._measured = measured
        self.shares = False
        self._signatures = Signatures()
        self._signature: Any = None
        self._comparison = Comparison()
        self._step_started: float | None = None
        self._call_lock, self._conversion_lock = threading.Lock(), threading.Lock()
        self._layouts: set[tuple[bool, Any]] = set()  # Those of results, each with whether an argument was reordered.
        self._running: set[int] = set()
        self._is_ending = self.has_ended = self.is_converted = self._runs_converted = self._reorders = self.is_left = (
            False
        )
        self._drained_by = float("inf")
        _trials.add(self)

    def after_fork(self) -> None:
        """Effect: in a forked child, forgets the calls of other threads and their locks, which would last forever."""
        self._call_lock, self._conversion_lock = threading.Lock(), threading.Lock()
        self._running &= {threading.get_ident()}

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The result of `run`, the call. Effect: converts the weights, or ends the trial, when it is time to."""
        lock = self._call_lock  # A process forked meanwhile has another one.
        if not lock.acquire(blocking=False):
            if self._give_up(module):
                report_event("eager", module=type(module).__name__, reason="several threads call it: no channels_last")
            return self._counted(run)
        try:
            return self._call(module, args, kwargs, run)
        finally:
            lock.release()

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if self.has_ended or self._is_ending:
            self._give_up(module)
            return self._counted(run)
        if not self._measured:
            self._convert(module)
            result = self.converted(module, args, kwargs, run)
            if self._keep():
                report_event("applied", setting="channels_last", detail=type(module).__name__)
            return result
        started, is_step = _clock(), module.training and torch.is_grad_enabled()
        counts = self._is_alike((module.training, torch.is_grad_enabled(), self._signatures.of(args, kwargs)), is_step)
        self._end_step(module, started)
        if self._comparison.is_second and not self.has_ended:
            result = self.converted(module, args, kwargs, run)
        else:
            result = self._counted(run)
            is_given, results = any(map(_is_reordered, tensors_of((args, kwargs)))), tensors_of(result)
            self._layouts.update((is_given, _layout(each)) for each in results)
            self._reorders = self._reorders or (not is_given and any(map(_is_reordered, results)))
        if counts and is_step:
            self._step_started = started
        elif counts:
            self._take(module, self._comparison.add(_clock() - started))
        self._take(module, self._comparison.pass_by())
        return result

    def _counted(self, run: Callable[[], Any]) -> Any:
        """The result of a call, which no conversion disturbs: a kernel reads the memory that one would free."""
        thread = threading.get_ident()
        with self._conversion_lock:
            self._running.add(thread)
        try:
            return run()
        finally:
            with self._conversion_lock:
                self._running.discard(thread)

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
        if step is None or self.has_ended or self._is_ending:
            return
        if step == "change":
            self._convert(module)
            return
        name = type(module).__name__
        own, converted = (f"{seconds * 1e3:.3g} ms" for seconds in self._comparison.estimates())
        if step == "keep":
            if self._keep():
                report_event("applied", setting="channels_last", detail=f"{name}: {converted}, {own} before")
            return
        self._give_up(module)
        report_event("eager", module=name, reason=f"channels_last is not faster: {converted}, its own layout {own}")

    def converted(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """The result of `run`, a call with converted weights, in a layout that the program knows.

        It may be one after the trial: in another mode a model may do what it did not do in that.
        """
        name, state, stays = type(module).__name__, mutation.random_state(), self.has_ended
        end = self._withdrawn if stays else self._give_up
        statistics, failure = mutation.running_statistics(module) if stays or not self._runs_converted else [], ""
        try:
            result = self._counted(run)
        except RuntimeError as error:
            if _is_programs(error):
                raise
            failure = f"{name} does not support channels_last: {text_of(error)}"
        if failure:  # Not above, as an error of the program would have that one as its context.
            if end(module):
                degraded(self._settings, "channels_last", failure)
            mutation.restore_random_state(state)
            mutation.restore(statistics)
            return self._counted(run)
        self._runs_converted = True
        changed = self._changed(result, args, kwargs, stays=stays)
        if not changed:
            return result
        if end(module):
            degraded(self._settings, "channels_last", f"results of {name} would have another memory layout")
        return contiguous(result, set(map(id, changed)))

    def _changed(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, stays: bool) -> list[Tensor]:
        """The results that have not the layout that they had before, as far as is known of their size after the trial.

        Arguments are looked at only if there may be any, for which nearly no call is a reason.
        """
        others = [each for each in tensors_of(result) if not each.is_contiguous()]
        if stays:
            others = [] if self._reorders else list(filter(_is_reordered, others))
        if not others:
            return []
        inputs = tensors_of((args, kwargs))
        is_given, given = any(map(_is_reordered, inputs)), set(map(mutation.storage_of, inputs))
        unknown = [] if stays and is_given else [each for each in others if mutation.storage_of(each) not in given]
        return [each for each in unknown if (is_given, _layout(each)) not in self._layouts]

    def _keep(self) -> bool:
        """Whether the weights stay converted. Effect: the trial ends, unless another thread is about to end it."""
        with self._conversion_lock:
            stays = not (self._is_ending or self.has_ended)
            self.has_ended = self.has_ended or stays
        return stays

    def _give_up(self, module: nn.Module) -> bool:
        """Whether the trial was going on. Effect: ends it; the weights get their own layout back.

        It waits until no other thread's call uses them; if that takes too long, a later call does it.
        """
        with self._conversion_lock:
            is_first = not (self._is_ending or self.has_ended)
            if is_first:
                self._is_ending, self._drained_by = True, time.monotonic() + DRAIN_SECONDS
        while not self._return(module) and time.monotonic() < self._drained_by:
            time.sleep(0.001)
        return is_first

    def withdraw(self, module: nn.Module, *, is_viewed: bool = False) -> None:
        """Effect: the weights get their own layout back, also after the trial; not while a call reads them.

        Those that have moved to another device get it back only where a program views them, which would fail else: a
        CUDA graph may read their memory.
        """
        self._give_up(module)
        with self._conversion_lock:
            if (self.is_converted or (is_viewed and self.is_left)) and not self._running:
                self._give_back(module, is_viewed=is_viewed)

    def leave(self, module: nn.Module) -> bool:
        """Whether the weights have their own layout again. Effect: gives it back at once, unless a call reads them."""
        with self._conversion_lock:
            if not self._running:
                self._give_back(module)
                self.has_ended = True
            elif not (self.has_ended or self._is_ending):
                self._is_ending, self._drained_by = True, time.monotonic() + DRAIN_SECONDS
            return not self.is_converted

    def _give_back(self, module: nn.Module, *, is_viewed: bool = False) -> None:
        own = [weight for weight in _weights(module) if (is_viewed or weight.is_cpu) and is_own(weight)]
        reorder(own, torch.contiguous_format)
        self.is_left = not is_viewed and not all(weight.is_cpu for weight in _weights(module))
        self.is_converted = False

    def _withdrawn(self, module: nn.Module) -> bool:
        """Whether the weights were converted. Effect: they get their own layout back once no call reads them.

        If they were converted for another module, it is not waited for its calls, which may wait for this one.
        """
        if self.shares:
            converted = [(other, trial) for other, trial in self._trials.others(module) if trial.is_converted]
            left = [trial.leave(other) for other, trial in converted]
            self.shares = not all(left)
            return any(left)
        was_converted, end = self.is_converted, time.monotonic() + DRAIN_SECONDS
        self.withdraw(module)
        while self.is_converted and time.monotonic() < end:
            time.sleep(0.001)
            self.withdraw(module)
        return was_converted

    def _return(self, module: nn.Module) -> bool:
        """Whether the trial has ended. Effect: ends it unless a call is running; moves no weight that is held."""
        with self._conversion_lock:
            if not (self.has_ended or self._running):
                if self.is_converted:
                    self._give_back(module)
                self.has_ended = True
            return self.has_ended

    def _convert(self, module: nn.Module) -> None:
        try:
            align_optimizers()
            with self._conversion_lock:
                if not self._is_ending and not _can_convert(module):  # The program has taken hold of its weights.
                    self.has_ended = True
                if not (self.has_ended or self._is_ending):
                    self._trials.share(module)
                    reorder(_weights(module), torch.channels_last)
                    self.is_converted = True
        except Exception as error:  # noqa: BLE001  The program continues with the layout that it has.
            self.has_ended = True
            degraded(self._settings, "channels_last", f"{type(module).__name__} cannot be converted: {text_of(error)}")


_trials: weakref.WeakSet[LayoutTrial] = weakref.WeakSet()


def _after_fork() -> None:
    for trial in _trials:
        trial.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _is_programs(error: RuntimeError) -> bool:
    """Whether a `raise` of Python code made the error, which says nothing of a layout: the call is not repeated."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or any(word in str(error).lower() for word in LAYOUT_WORDS):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _is_reordered(tensor: Tensor) -> bool:
    """Whether a tensor is in channels_last, and not in torch's own layout too."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of two-dimensional convolutions, also where torch computes them from other parameters."""
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)]
    parameters = {id(weight): weight for part in convolutions for weight in part.parameters() if weight.dim() == 4}
    return list(parameters.values())


def _weights_if_known(module: nn.Module) -> list[Tensor]:
    """Those weights; none if the module does not tell them, and so is not converted either."""
    with suppress(Exception):  # It may have no hash, or override `modules` or `parameters`.
        return _weights(module)
    return []


def _can_convert(module: nn.Module) -> bool:
    """Whether the module has two-dimensional convolutions whose weights only it holds, in torch's own layout.

    A conversion moves a weight to other memory. What the program, or another process, then writes to the memory that it
    holds would be lost. Hooks would see results inside the module in another layout.
    """
    with suppress(Exception):  # A class may override `modules` or `parameters`.
        weights = _weights(module)
        return bool(weights) and all(map(may_move, weights)) and not has_hooks(module)
    return False
