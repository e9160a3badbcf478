"""The captures of a process: for each module that is called, its captured calls and why other calls run eagerly."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.capture import Call, Captured, MismatchError, best_seconds, changes_tensors, check
from cpulaunch.worker.graph.trace import RefusedError
from cpulaunch.worker.graph.weights import Weights
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.tensors.pytree import UnknownStructureError, describe, flatten, key_of, key_of_tensors

Eager = Callable[[bool], Any]
"""Runs the call eagerly. With True, calls of submodules may be captured."""

Engine = Callable[[Call, Any, Weights], Captured]
"""Captures a call, given its eager result and the weights to freeze."""

VERIFIED_CALLS = 2
"""Captured results that are compared with eager ones: at the capture, and at the next call, with other inputs."""

MAX_MODULES = 64
"""Limit of captured modules per process: each costs seconds and a copy of its weights."""

MAX_CHANGES = 4
"""Limit of weight changes: a module that exceeds it is being trained and runs eagerly; a capture takes seconds."""

TOLERATED_SLOWDOWN = 1.05
"""A capture that takes longer than eager execution by more than this factor is not used; noise is below it."""

MIN_WEIGHTED_PARTS = 2
"""A submodule is captured by itself only if it contains at least this many modules with weights."""


class Captures:
    """All captures of a process. `call` is thread-safe; only one thread captures at a time."""

    def __init__(self, settings: TorchSettings, engine: Engine) -> None:
        self.settings = settings
        self._engine = engine
        self._states: dict[int, ModuleState] = {}
        self._capture_lock = threading.Lock()
        self.bytes = 0
        self.modules = 0

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Eager, *, outermost: bool
    ) -> Any:
        """The result of the module's call, by a captured graph where there is one."""
        state = self._state(module, outermost)
        reason = _not_capturable_reason(module)
        if reason is not None:
            state.record_reason(reason)
            return eager(False)
        if state.finished:
            return eager(state.try_submodules)
        key = key_of_tensors(args, kwargs)
        if key is not None:
            return self._with_key(state, key, Call(module=module, args=args, kwargs=kwargs, inputs=list(args)), eager)
        inputs: list[torch.Tensor] = []
        try:
            key = key_of(flatten((args, kwargs), inputs), inputs)
        except UnknownStructureError as error:
            return self._try_submodules(state, f"it takes {error}", eager)
        if key is None:
            return self._try_submodules(state, "it takes arguments that cannot be compared", eager)
        return self._with_key(state, key, Call(module=module, args=args, kwargs=kwargs, inputs=inputs), eager)

    def is_large_enough(self, module: nn.Module) -> bool:
        """Whether a submodule of a module that could not be captured is large enough for a capture of its own."""
        state = self._states.get(id(module))
        if state is not None and state.module() is module:
            return True
        weighted_parts = 0
        with suppress(Exception):  # A class may override `modules`.
            for part in module.modules():
                weighted_parts += any(value is not None for value in part._parameters.values())
                if weighted_parts >= MIN_WEIGHTED_PARTS:
                    return True
        return False

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

    def _with_key(self, state: ModuleState, key: tuple[Any, ...], call: Call, eager: Eager) -> Any:
        if state.weights is not None and not state.weights.unchanged():
            self._drop_stale(state)
        recent = state.recent
        if recent is not None and recent[0] == key and recent[1].holds(call):
            return self._run(state, recent[1], call, eager)
        if key in state.refused:
            return eager(True)
        if key in state.not_used:
            return eager(False)
        for captured in state.captures.get(key, ()):
            if captured.holds(call):
                state.recent = (key, captured)
                return self._run(state, captured, call, eager)
        if not state.should_capture(key, self.settings.graph_signatures) or not self._capture_lock.acquire(
            blocking=False
        ):
            return eager(state.try_submodules)
        try:
            return self._make(state, key, call, eager)
        finally:
            self._capture_lock.release()

    def _run(self, state: ModuleState, captured: Captured, call: Call, eager: Eager) -> Any:
        """The captured result, or the eager one while it is being verified or when it fails."""
        try:
            result = captured.run(call)
        except Exception as error:  # noqa: BLE001  After any failure of a graph the eager result is still right.
            self._give_up(state, f"the captured graph failed: {error}")
            return eager(False)
        if state.verified.get(id(captured), 0) >= VERIFIED_CALLS - 1:
            return result
        expected = eager(False)
        state.verified[id(captured)] = state.verified.get(id(captured), 0) + 1
        try:
            check(expected, result, low_precision=captured.low_precision)
        except Exception as error:  # noqa: BLE001  After any failure of the comparison the eager result is still right.
            self._give_up(state, f"the captured graph gives a different result: {error}")
        return expected

    def _make(self, state: ModuleState, key: tuple[Any, ...], call: Call, eager: Eager) -> Any:
        """The eager result of a call. Effect: captures the call, or records why it cannot be captured."""
        try:
            not_on_cpu, refusal = _uses_other_device(call), self._limit_reached(state)
            weights = state.weights if not_on_cpu or state.weights else Weights(call.module)
        except Exception as error:  # noqa: BLE001  Tensors without storage or version, or an overridden `parameters`.
            self._refuse(state, key, f"changes of its tensors cannot be detected: {error}")
            return eager(True)
        if not_on_cpu:
            state.not_used.add(key)
            state.record_reason("it is not on the CPU")
            return eager(False)
        if refusal is not None or weights is None:
            state.finish(refusal or "changes of its tensors cannot be detected")
            return eager(False)
        result, change = changes_tensors(call, weights, lambda: eager(False))
        if change:
            self._refuse(state, key, change)
            return result
        state.weights = weights
        try:
            captured = self._engine(call, result, weights)
        except RefusedError as error:
            self._refuse(state, key, str(error))
        except MismatchError as error:
            self._give_up(state, f"the captured graph gives a different result: {error}")
        except Exception as error:  # noqa: BLE001  A failed capture must not become an error of the program.
            self._give_up(state, f"it cannot be captured: {error}")
        else:
            self._keep_if_faster(state, key, call, captured, lambda: eager(False))
        return result

    def _keep_if_faster(
        self, state: ModuleState, key: tuple[Any, ...], call: Call, captured: Captured, eager: Callable[[], Any]
    ) -> None:
        """Effect: uses the capture unless it is slower, as are small products of one row on some CPUs."""
        graph, plain = best_seconds(lambda: captured.run(call), eager)
        if graph <= plain * TOLERATED_SLOWDOWN:
            self._keep(state, key, call, captured, speedup=plain / graph)
            return
        state.not_used.add(key)
        state.record_reason(
            f"eager execution is faster: {plain * 1e3:.3g} ms, captured {graph * 1e3:.3g} ms ({describe(call.inputs)})"
        )

    def _limit_reached(self, state: ModuleState) -> str | None:
        """Which limit a first capture of the module would exceed; None if none."""
        if state.captures:
            return None
        limit = self.settings.graph_memory_bytes
        module = state.module()
        if limit is not None and module is not None and self.bytes + _weight_bytes(module) > limit:
            return f"its frozen weights would exceed the limit of {limit >> 20} MiB for captures"
        return f"{MAX_MODULES} modules of this process are captured already" if self.modules >= MAX_MODULES else None

    def _keep(
        self, state: ModuleState, key: tuple[Any, ...], call: Call, captured: Captured, *, speedup: float
    ) -> None:
        if not state.captures:
            self.modules += 1
        state.captures.setdefault(key, []).append(captured)
        state.bytes += captured.bytes
        self.bytes += captured.bytes
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

    def _refuse(self, state: ModuleState, key: tuple[Any, ...], reason: str) -> None:
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
        self.bytes -= state.bytes
        self.modules -= bool(state.captures)
        state.drop()


class ModuleState:
    """The state of one module.

    `try_submodules`: its submodules may be captured. `finished`: it runs eagerly from now on.
    By signature: `captures` are in use; `refused` cannot be captured, but submodules may be; `not_used` gain nothing
    from a capture. `recent` is the capture used last.
    """

    def __init__(self, module: nn.Module, *, outermost: bool) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.outermost = outermost
        self.captures: dict[tuple[Any, ...], list[Captured]] = {}
        self.recent: tuple[tuple[Any, ...], Captured] | None = None
        self.verified: dict[int, int] = {}
        self.refused: set[tuple[Any, ...]] = set()
        self.not_used: set[tuple[Any, ...]] = set()
        self.seen: set[tuple[Any, ...]] = set()
        self.weights: Weights | None = None
        self.bytes = 0
        self.changes = 0
        self.calls_to_wait = 0
        self.try_submodules = False
        self.finished = False
        self._reasons: set[str] = set()

    def should_capture(self, key: tuple[Any, ...], limit: int) -> bool:
        """Whether to capture this signature now: the first one immediately, others at their second call.

        After a change of weights some calls run eagerly first, twice as many each time: more changes may follow.
        """
        if self.calls_to_wait:
            self.calls_to_wait -= 1
            return False
        tried = sum(map(len, self.captures.values())) + len(self.refused) + len(self.not_used)
        if tried >= limit:
            self.record_reason(f"it is called with more than {limit} signatures")
            return False
        if tried and key not in self.seen and key not in self.captures:
            self.seen.add(key)
            return False
        return True

    def drop(self) -> None:
        """Effect: drops all captures of the module."""
        self.recent = None
        self.captures.clear()
        self.not_used.clear()
        self.verified.clear()
        self.weights = None
        self.bytes = 0
        self.calls_to_wait = 1 << self.changes

    def record_reason(self, reason: str) -> bool:
        """Whether the reason is new. Effect: reports a new reason."""
        if reason in self._reasons:
            return False
        self._reasons.add(reason)
        report_event("eager", module=self.name, reason=reason)
        return True

    def finish(self, reason: str) -> bool:
        """Whether the reason is new. Effect: the module runs eagerly from now on."""
        self.finished = True
        return self.record_reason(reason)


def _not_capturable_reason(module: nn.Module) -> str | None:
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


def _uses_other_device(call: Call) -> bool:
    """Whether an argument, parameter or buffer is on a device other than the CPU."""
    tensors = (*call.inputs, *call.module.parameters(), *call.module.buffers())
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _weight_bytes(module: nn.Module) -> int:
    """Bytes that freezing a module may take: one packed copy of its weights."""
    with suppress(NotImplementedError):
        return sum(tensor.untyped_storage().nbytes() for tensor in module.parameters())
    return 0
