"""The captures of a process: for each module that is called, its captured calls and why other calls run eagerly."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.capture import (
    DRAWS,
    Call,
    Captured,
    MismatchError,
    PendingError,
    best_seconds,
    changes_tensors,
    check,
    forget_prepared,
    has_changed_arguments,
    is_being_tried,
    is_prepared,
)
from cpulaunch.worker.graph.eligibility import (
    Usage,
    has_weighted_parts,
    is_too_early,
    not_capturable_reason,
    parts_of,
    uses_other_device,
)
from cpulaunch.worker.graph.module_state import LAST_ASKING_PAUSE, Key, ModuleState
from cpulaunch.worker.graph.onednn import UnboundedError
from cpulaunch.worker.graph.precision import is_on_cpu
from cpulaunch.worker.graph.trace import RefusedError
from cpulaunch.worker.graph.weights import Weights
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event, text_of
from cpulaunch.worker.tensors.mutation import others_may_draw
from cpulaunch.worker.tensors.pytree import UnknownStructureError, describe, flatten, key_of, key_of_tensors

Eager = Callable[[bool], Any]
"""Runs the call eagerly; in whichever mode if it has been counted as pending. With True, calls of submodules may be
captured."""

Engine = Callable[[Call, Any, Weights], Captured]
"""Captures a call, given its eager result and the weights to freeze."""

VERIFIED_CALLS = 2
"""Captured results that are compared with eager ones: at the capture, and at the next call, with other inputs."""

UNBOUNDED_CALLS, UNBOUNDED_SHARE = 8, 0.05
"""A module runs eagerly after more calls than that, and a larger share of its others, whose graph ran in vain."""

MAX_CHANGES = 4
"""Limit of weight changes: a module that exceeds it is being trained and runs eagerly; a capture takes seconds."""

TOLERATED_SLOWDOWN = 1.05
"""A capture that takes longer than eager execution by more than this factor is not used; noise is below it."""


class _Own(threading.local):
    """What the calls of one thread have done for captures.

    `seconds`: how long captures took. `preparations`: how many calls did more than run a module or a graph: they made,
    verified or dropped a capture, or wait for one; their durations say nothing about later calls. `pending`: how many
    found a capture in preparation elsewhere, or too early.
    """

    seconds = 0.0
    preparations = 0
    pending = 0


class Captures:
    """All captures of a process. `call` is thread-safe; only one thread captures at a time.

    `seconds_of`: how long all calls of a module have taken, in other modes too. `own`: of this thread.
    """

    def __init__(self, settings: TorchSettings, engine: Engine) -> None:
        self.settings = settings
        self._engine = engine
        self._states: dict[int, ModuleState] = {}
        self._capture_lock = threading.Lock()
        self.usage = Usage(settings)
        self.own = _Own()
        self.seconds_of: Callable[[nn.Module], float] = lambda module: 0.0

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Eager, *, outermost: bool
    ) -> Any:
        """The result of the module's call, by a captured graph where there is one."""
        state = self._state(module, outermost)
        reason = not_capturable_reason(module)
        if reason is not None:
            self.own.preparations += 1
            state.record_reason(reason)
            return eager(False)
        if state.finished:
            return eager(state.try_submodules)
        key = key_of_tensors(args, kwargs)
        if key is not None:
            call = Call(module=module, args=args, kwargs=kwargs, inputs=list(args))
            return self._with_key(state, key, call, eager, outermost=outermost)
        inputs: list[torch.Tensor] = []
        unknown = "arguments that cannot be compared"
        try:
            spec = flatten((args, kwargs), inputs)
            key = key_of(spec, inputs)
        except UnknownStructureError as error:
            unknown = str(error)
        if key is None:
            return self._try_submodules(state, f"it takes {unknown}", eager)
        call = Call(module=module, args=args, kwargs=kwargs, inputs=inputs, spec=spec)
        return self._with_key(state, key, call, eager, outermost=outermost)

    def after_fork(self) -> None:
        """Effect: in a forked process, frees the lock, which a thread of the parent may have held."""
        self._capture_lock = threading.Lock()

    def is_large_enough(self, module: nn.Module) -> bool:
        """Whether a submodule of a module that could not be captured is large enough for a capture of its own."""
        state = self._states.get(id(module))
        if state is not None and state.module() is module:
            return True
        return has_weighted_parts(module)

    def can_capture(self, module: nn.Module) -> bool:
        """Whether calls of this module may be captured in the present mode. Effect: reports why, if not."""
        reason = not_capturable_reason(module) or (None if is_on_cpu(module) else "it is not on the CPU")
        state = self._state(module, outermost=True)
        if reason is not None:
            state.record_reason(reason)
        return reason is None and not self.is_finished(module)

    def is_finished(self, module: nn.Module) -> bool:
        """Whether neither this module nor parts of it will be captured any more."""
        state = self._states.get(id(module))
        return state is not None and state.module() is module and state.finished and not state.try_submodules

    def retire(self, module: nn.Module, reason: str) -> None:
        """Effect: drops the captures of a module and of its parts for good."""
        for part in parts_of(module):
            state = self._states.get(id(part))
            if state is None or state.module() is not part or (state.outermost and part is not module):
                continue
            self._drop(state)
            state.finished, state.try_submodules = True, False
            if part is module:
                state.record_reason(reason)

    def _state(self, module: nn.Module, outermost: bool) -> ModuleState:
        state = self._states.get(id(module))
        if state is None or state.module() is not module:
            state = self._states[id(module)] = ModuleState(module, outermost=outermost)
            weakref.finalize(module, self._release, id(module), state).atexit = False
        return state

    def _release(self, address: int, state: ModuleState) -> None:
        """Effect: drops the captures of a module that no longer exists and the memory counted for them."""
        self._drop(state)
        if self._states.get(address) is state:
            del self._states[address]

    def _try_submodules(self, state: ModuleState, reason: str, eager: Eager) -> Any:
        state.record_reason(reason)
        state.try_submodules = True
        return eager(True)

    def _with_key(self, state: ModuleState, key: Key, call: Call, eager: Eager, *, outermost: bool) -> Any:
        if state.weights is not None and not state.weights.unchanged():
            self._drop_stale(state)
        recent = state.recent
        if recent is not None and recent[0] == key and recent[1].holds(call):
            return self._run(state, recent[1], call, eager)
        if key in state.refused:
            return eager(True)
        if key in state.not_used:
            self.own.pending += outermost  # It runs in another mode.
            return eager(False)
        for captured in state.captures.get(key, ()):
            if captured.holds(call):
                state.recent = (key, captured)
                return self._run(state, captured, call, eager)
        return self._without_capture(state, key, call, eager)

    def _without_capture(self, state: ModuleState, key: Key, call: Call, eager: Eager) -> Any:
        """The eager result of a call. Effect: captures the call if it is time to."""
        reason = state.limit_reason(self.settings.graph_signatures) or self.usage.budget_reason()
        if reason is not None:
            forget_prepared(state.weights)
            state.record_reason(reason)
            return eager(state.try_submodules)
        self.own.preparations += 1
        now = time.perf_counter()
        if state.is_pending(key, now):
            return self._postponed(state, eager)
        if is_being_tried(call, state.weights):
            state.postpone(key, now, longest=LAST_ASKING_PAUSE)
            return self._postponed(state, eager)
        if not (self.usage.affords_capture(now) or is_prepared(call, state.weights)):
            return self._postponed(state, eager)
        if state.must_wait(key):
            return self._eagerly(state, key, lambda: eager(state.try_submodules))
        lock = self._capture_lock  # A process forked meanwhile has another one.
        if self._is_too_early(state, key, call.module) or not lock.acquire(blocking=False):
            return self._postponed(state, eager)
        try:
            if state.is_settled(key, call):  # By another thread, since this one has looked for a capture.
                return eager(state.try_submodules)
            return self._make(state, key, call, eager)
        finally:
            lock.release()

    def _eagerly(self, state: ModuleState, key: Key | None, eager: Callable[[], Any]) -> Any:
        """The eager result of a call. Effect: counts its duration; `key` None: not as one of its kind."""
        started = time.perf_counter()
        result = eager()
        state.add_eager(key, time.perf_counter() - started)
        return result

    def _postponed(self, state: ModuleState, eager: Eager) -> Any:
        """The result of a call that may be captured later. Effect: counts it as pending first, so that `eager` may run
        it in another mode."""
        self.own.pending += 1
        return self._eagerly(state, None, lambda: eager(state.try_submodules))

    def _run(self, state: ModuleState, captured: Captured, call: Call, eager: Eager) -> Any:
        """The captured result, or the eager one while it is being verified or when it fails."""
        if not captured.accepts(call.inputs):
            return eager(False)
        has_run = False
        try:
            result = captured.run(call)
            has_run = True
        except UnboundedError as unbounded:
            state.unbounded += 1
            if state.unbounded > UNBOUNDED_CALLS and state.unbounded > UNBOUNDED_SHARE * state.bounded:
                self._drop(state)
                state.finish(f"its calls would often run twice: {unbounded}")
        except Exception as error:  # noqa: BLE001  After any failure of a graph the eager result is still right.
            self._give_up(state, f"the captured graph failed: {text_of(error)}")
        if not has_run:  # Not above, as an error of the program would have that one as its context.
            return eager(False)
        state.bounded += 1
        if state.verified.get(id(captured), 0) >= VERIFIED_CALLS - 1:
            self.usage.saved += captured.saved_seconds
            return result
        self.own.preparations += 1
        expected = eager(False)
        state.verified[id(captured)] = state.verified.get(id(captured), 0) + 1
        try:
            check(expected, result, low_precision=captured.low_precision)
        except Exception as error:  # noqa: BLE001  After any failure of the comparison the eager result is still right.
            self._give_up(state, f"the captured graph gives a different result: {text_of(error)}")
        return expected

    def _make(self, state: ModuleState, key: Key, call: Call, eager: Eager) -> Any:
        """The eager result of a call. Effect: captures the call, or records why it cannot be captured."""
        is_held, failure = False, ""
        try:
            not_on_cpu = uses_other_device(call)
            refusal = None if state.captures else self.usage.module_limit_reason(call.module)
            weights = state.weights if not_on_cpu or state.weights else Weights(call.module)
            is_held = weights is not None and not not_on_cpu and weights.are_held_elsewhere()
        except Exception as error:  # noqa: BLE001  Tensors without storage or version, or an overridden `parameters`.
            failure = f"changes of its tensors cannot be detected: {text_of(error)}"
        if failure:
            self._refuse(state, key, failure)
            return eager(True)
        if not_on_cpu:
            state.not_used.add(key)
            state.record_reason("it is not on the CPU")
            return eager(False)
        if refusal is not None or weights is None:
            state.finish(refusal or "changes of its tensors cannot be detected")
            return eager(False)
        if is_held:
            state.record_reason("the program holds the memory of its weights by other tensors, which may change it")
            state.postpone(key, time.perf_counter())
            return self._postponed(state, eager)
        return self._make_if_repeatable(state, key, call, weights, eager)

    def _make_if_repeatable(self, state: ModuleState, key: Key, call: Call, weights: Weights, eager: Eager) -> Any:
        """The eager result of a call. Effect: captures the call, unless it changes tensors."""
        result, change = self._eagerly(state, key, lambda: changes_tensors(call, weights, lambda: eager(False)))
        if change == DRAWS and others_may_draw() and state.may_be_others_draws():
            state.postpone(key, time.perf_counter())
            return result
        if change:
            self._refuse(state, key, change)
            return result
        state.weights = weights
        started = time.perf_counter()
        try:
            self._capture(state, key, replace(call, seconds=state.shortest(key)), result, weights, eager)
        finally:
            spent = time.perf_counter() - started
            self.usage.add_seconds(spent)
            self.own.seconds += spent
        return result

    def _is_too_early(self, state: ModuleState, key: Key, module: nn.Module) -> bool:
        """Whether the module is not captured yet, and shall not be after this call either."""
        if state.captures or not state.outermost:
            return False
        seconds = state.shortest(key)
        spent = max(state.eager_seconds + seconds, self.seconds_of(module))
        return is_too_early(seconds, spent, imports="torch._dynamo" not in sys.modules)

    def _capture(self, state: ModuleState, key: Key, call: Call, result: Any, weights: Weights, eager: Eager) -> None:
        """Effect: captures the call, or records why it cannot be captured."""
        try:
            if has_changed_arguments(call):
                raise RefusedError("it changes an argument")
            captured = self._engine(call, result, weights)
        except PendingError:
            self.own.pending += 1
            state.postpone(key, time.perf_counter())
        except RefusedError as error:
            self._refuse(state, key, str(error))
        except MismatchError as error:
            self._give_up(state, f"the captured graph gives a different result: {text_of(error)}")
        except Exception as error:  # noqa: BLE001  A failed capture must not become an error of the program.
            self._give_up(state, f"it cannot be captured: {text_of(error)}")
        else:
            self._keep_if_faster(state, key, call, captured, lambda: eager(False))

    def _keep_if_faster(
        self, state: ModuleState, key: Key, call: Call, captured: Captured, eager: Callable[[], Any]
    ) -> None:
        """Effect: uses the capture unless it is slower, as are small products of one row on some CPUs."""
        graph, plain = best_seconds(lambda: captured.accepts(call.inputs) and captured.run(call), eager)
        if graph <= plain * TOLERATED_SLOWDOWN:
            kept = replace(captured, saved_seconds=max(0.0, plain - graph))
            self._keep(state, key, call, kept, speedup=plain / graph)
            return
        state.not_used.add(key)
        state.record_reason(
            f"eager execution is faster: {plain * 1e3:.3g} ms, captured {graph * 1e3:.3g} ms ({describe(call.inputs)})"
        )

    def _keep(self, state: ModuleState, key: Key, call: Call, captured: Captured, *, speedup: float) -> None:
        if not state.captures:
            self.usage.modules += 1
        state.captures.setdefault(key, []).append(captured)
        state.bytes += captured.bytes
        self.usage.bytes += captured.bytes
        report_event(
            "captured",
            module=state.name,
            signature=describe(call.inputs),
            engine=self.settings.graph,
            seconds=round(captured.seconds, 3),
            error=captured.error,
            speedup=round(speedup, 2),
            frozen_bytes=captured.bytes,
        )

    def _refuse(self, state: ModuleState, key: Key, reason: str) -> None:
        state.refused.add(key)
        first = state.record_reason(reason)
        state.try_submodules = True
        if first and state.outermost:
            degraded(
                self.settings, "graph", f"{state.name} cannot be captured as a whole, so its parts are tried: {reason}"
            )

    def _give_up(self, state: ModuleState, reason: str) -> None:
        self._drop(state)
        if state.finish(reason):
            degraded(self.settings, "graph", f"{state.name} runs eagerly: {reason}")

    def _drop_stale(self, state: ModuleState) -> None:
        """Effect: drops captures whose weights have changed; after MAX_CHANGES the module is not captured again."""
        if not state.captures:
            state.weights = None
            return
        self._drop(state)
        state.changes += 1
        report_event("eager", module=state.name, reason="its weights changed, so it is captured again")
        if state.changes > MAX_CHANGES:
            state.finish("its weights change too often")

    def _drop(self, state: ModuleState) -> None:
        self.usage.bytes -= state.bytes
        self.usage.modules -= bool(state.captures)
        state.drop()
