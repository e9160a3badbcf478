"""Every module that is called: what of it is captured, what stays eager, and why."""

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
from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten, key_of, key_of_tensors, words

Eager = Callable[[bool], Any]
"""Runs the call eagerly; True: with the modules below it captured where they can be."""

Engine = Callable[[Call, Any, Weights], Captured]

VERIFIED_CALLS = 2
"""Captured results compared with eager ones: at the capture, and at the next call, which has other inputs."""

MAX_MODULES = 64
"""Modules captured in one process: each costs seconds and a copy of its weights."""

MAX_CHANGES = 4
"""Changes of a module's weights after which it stays eager: it is being trained, and each capture takes seconds."""

TOLERATED_SLOWDOWN = 1.05
"""A capture slower than eager by more than this, in time, is not used. Noise alone should not decide."""

LEAVES_WORTH_IT = 2
"""Modules with weights in a part of a module that is worth a capture of its own."""


class Captures:
    """All captures of a process. `call` may be used by several threads; captures are made one at a time."""

    def __init__(self, settings: TorchSettings, engine: Engine) -> None:
        self.settings = settings
        self._engine = engine
        self._states: dict[int, ModuleState] = {}
        self._making = threading.Lock()
        self.bytes = 0
        self.modules = 0

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Eager, *, outermost: bool
    ) -> Any:
        """The result of the module's call, captured if it can be."""
        state = self._state(module, outermost)
        reason = _unfit(module)
        if reason is not None:
            state.record_reason(reason)
            return eager(False)
        if state.finished:
            return eager(state.open)
        key = key_of_tensors(args, kwargs)
        if key is not None:
            return self._with_key(state, key, Call(module=module, args=args, kwargs=kwargs, inputs=list(args)), eager)
        inputs: list[torch.Tensor] = []
        try:
            key = key_of(flatten((args, kwargs), inputs), inputs)
        except UnknownStructureError as error:
            return self._open(state, f"it takes {error}", eager)
        if key is None:
            return self._open(state, "it takes arguments that cannot be compared", eager)
        return self._with_key(state, key, Call(module=module, args=args, kwargs=kwargs, inputs=inputs), eager)

    def worth_it(self, module: nn.Module) -> bool:
        """Whether a part of a module that could not be captured is large enough for a capture of its own."""
        state = self._states.get(id(module))
        if state is not None and state.module() is module:
            return True
        leaves = 0
        with suppress(Exception):  # A class may have a `modules` of its own.
            for part in module.modules():
                leaves += any(value is not None for value in part._parameters.values())
                if leaves >= LEAVES_WORTH_IT:
                    return True
        return False

    def _state(self, module: nn.Module, outermost: bool) -> ModuleState:
        state = self._states.get(id(module))
        if state is None or state.module() is not module:
            state = self._states[id(module)] = ModuleState(module, outermost=outermost)
            weakref.finalize(module, self._gone, id(module), state).atexit = False
        return state

    def _gone(self, address: int, state: ModuleState) -> None:
        """Effect: what a module that no longer exists took is free for others."""
        self._drop(state)
        if self._states.get(address) is state:
            del self._states[address]

    def _open(self, state: ModuleState, reason: str, eager: Eager) -> Any:
        state.record_reason(reason)
        state.open = True
        return eager(True)

    def _with_key(self, state: ModuleState, key: tuple[Any, ...], call: Call, eager: Eager) -> Any:
        if state.weights is not None and not state.weights.unchanged():
            self._forget(state)
        recent = state.recent
        if recent is not None and recent[0] == key and recent[1].holds(call):
            return self._run(state, recent[1], call, eager)
        if key in state.refused:
            return eager(True)
        if key in state.left:
            return eager(False)
        for captured in state.captures.get(key, ()):
            if captured.holds(call):
                state.recent = (key, captured)
                return self._run(state, captured, call, eager)
        if not state.wants(key, self.settings.graph_signatures) or not self._making.acquire(blocking=False):
            return eager(state.open)
        try:
            return self._make(state, key, call, eager)
        finally:
            self._making.release()

    def _run(self, state: ModuleState, captured: Captured, call: Call, eager: Eager) -> Any:
        """The captured result, or the eager one while it is being verified or when it fails."""
        try:
            result = captured.run(call)
        except Exception as error:  # noqa: BLE001  Whatever a graph raises, eager execution is still right.
            self._give_up(state, f"the captured graph failed: {error}")
            return eager(False)
        if state.verified.get(id(captured), 0) >= VERIFIED_CALLS - 1:
            return result
        expected = eager(False)
        state.verified[id(captured)] = state.verified.get(id(captured), 0) + 1
        try:
            check(expected, result, low_precision=captured.low_precision)
        except Exception as error:  # noqa: BLE001  Whatever comparing raises, the eager result is right.
            self._give_up(state, f"the captured graph computes something else: {error}")
        return expected

    def _make(self, state: ModuleState, key: tuple[Any, ...], call: Call, eager: Eager) -> Any:
        """The eager result of a call that is then captured, or refused."""
        try:
            elsewhere, refusal = _elsewhere(call), self._too_much(state)
            weights = state.weights if elsewhere or state.weights else Weights(call.module)
        except Exception as error:  # noqa: BLE001  Tensors without memory or versions, a `parameters` of the class.
            self._refuse(state, key, f"its tensors cannot be watched: {error}")
            return eager(True)
        if elsewhere:
            state.left.add(key)
            state.record_reason("it is not on the CPU")
            return eager(False)
        if refusal is not None or weights is None:
            state.finish(refusal or "its tensors cannot be watched")
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
            self._give_up(state, f"captured, it computes something else: {error}")
        except Exception as error:  # noqa: BLE001  No failure of a capture may reach the program.
            self._give_up(state, f"it cannot be captured: {error}")
        else:
            self._keep_if_faster(state, key, call, captured, lambda: eager(False))
        return result

    def _keep_if_faster(
        self, state: ModuleState, key: tuple[Any, ...], call: Call, captured: Captured, eager: Callable[[], Any]
    ) -> None:
        """Effect: the capture is used, unless it is slower: small products of one row are, on some CPUs."""
        graph, plain = best_seconds(lambda: captured.run(call), eager)
        if graph <= plain * TOLERATED_SLOWDOWN:
            self._keep(state, key, call, captured, speedup=plain / graph)
            return
        state.left.add(key)
        state.record_reason(
            f"eager is faster: {plain * 1e3:.3g} ms, captured {graph * 1e3:.3g} ms ({words(call.inputs)})"
        )

    def _too_much(self, state: ModuleState) -> str | None:
        if state.captures:
            return None
        bound = self.settings.graph_memory_bytes
        module = state.module()
        if bound is not None and module is not None and self.bytes + _weight_bytes(module) > bound:
            return f"its frozen weights would exceed the {bound >> 20} MiB set aside for captures"
        return f"{MAX_MODULES} modules are captured already" if self.modules >= MAX_MODULES else None

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
            signature=words(call.inputs),
            engine=self.settings.graph,
            seconds=round(captured.seconds, 3),
            error=captured.error,
            speedup=round(speedup, 2),
            frozen_bytes=captured.bytes,
        )

    def _refuse(self, state: ModuleState, key: tuple[Any, ...], reason: str) -> None:
        state.refused.add(key)
        first = state.record_reason(reason)
        state.open = True
        if first and state.outermost:
            degraded(self.settings, "graph", f"{state.name} is not captured as a whole: {reason}")

    def _give_up(self, state: ModuleState, reason: str) -> None:
        self._drop(state)
        if state.finish(reason):
            degraded(self.settings, "graph", f"{state.name} stays eager: {reason}")

    def _forget(self, state: ModuleState) -> None:
        """Effect: what was captured with other weights is gone; after too many changes for good."""
        if not state.captures:
            state.weights = None
            return
        self._drop(state)
        state.changes += 1
        report_event("eager", module=state.name, reason="its weights changed: captured anew")
        if state.changes > MAX_CHANGES:
            state.finish("its weights keep changing")

    def _drop(self, state: ModuleState) -> None:
        self.bytes -= state.bytes
        self.modules -= bool(state.captures)
        state.drop()


class ModuleState:
    """What is known of one module. `open`: the modules below it are tried; `finished`: it is eager for good.

    Of signatures: `captures` are used, `refused` cannot be captured, `left` had better not; `recent` was used last.
    """

    def __init__(self, module: nn.Module, *, outermost: bool) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.outermost = outermost
        self.captures: dict[tuple[Any, ...], list[Captured]] = {}
        self.recent: tuple[tuple[Any, ...], Captured] | None = None
        self.verified: dict[int, int] = {}
        self.refused: set[tuple[Any, ...]] = set()
        self.left: set[tuple[Any, ...]] = set()
        self.seen: set[tuple[Any, ...]] = set()
        self.weights: Weights | None = None
        self.bytes = 0
        self.changes = 0
        self.calls_to_wait = 0
        self.open = False
        self.finished = False
        self._remarks: set[str] = set()

    def wants(self, key: tuple[Any, ...], limit: int) -> bool:
        """Whether to capture this signature now: the first at once, others when they come a second time.

        After a change of weights it waits, twice as long each time: they may change again.
        """
        if self.calls_to_wait:
            self.calls_to_wait -= 1
            return False
        tried = sum(map(len, self.captures.values())) + len(self.refused) + len(self.left)
        if tried >= limit:
            self.record_reason(f"it is called with more than {limit} signatures")
            return False
        if tried and key not in self.seen and key not in self.captures:
            self.seen.add(key)
            return False
        return True

    def drop(self) -> None:
        """Effect: nothing is captured any more."""
        self.recent = None
        self.captures.clear()
        self.left.clear()
        self.verified.clear()
        self.weights = None
        self.bytes = 0
        self.calls_to_wait = 1 << self.changes

    def record_reason(self, reason: str) -> bool:
        """Whether this is new. Effect: the report has the reason, once."""
        if reason in self._remarks:
            return False
        self._remarks.add(reason)
        report_event("eager", module=self.name, reason=reason)
        return True

    def finish(self, reason: str) -> bool:
        """Whether this is new. Effect: the module stays eager for good."""
        self.finished = True
        return self.record_reason(reason)


def _unfit(module: nn.Module) -> str | None:
    """Why this call of the module is none to capture, whatever its arguments; None if it may be."""
    if module.training:
        return "it is in training mode"
    if torch.is_grad_enabled():
        return "gradients are on (the program uses no torch.no_grad; --inference-mode turns them off)"
    if any((torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)):
        return "there are global forward hooks"
    if torch._C._len_torch_function_stack() and _observed():
        return "a torch function mode sees every operation"
    return None


def _observed() -> bool:
    """Whether a torch function mode besides `torch.set_default_device`'s is on."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)


def _elsewhere(call: Call) -> bool:
    """Whether the call concerns another device."""
    tensors = (*call.inputs, *call.module.parameters(), *call.module.buffers())
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _weight_bytes(module: nn.Module) -> int:
    """What freezing a module may cost: one packed copy of its weights."""
    with suppress(NotImplementedError):
        return sum(tensor.untyped_storage().nbytes() for tensor in module.parameters())
    return 0
