"""The modes in which a module's call can run: as it is, with resident weights, in autocast, or by captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.hooks import newest_hook, watch_hooks
from cpulaunch.worker.graph.precision import (
    LOW,
    Precision,
    device_of,
    is_of_arguments,
    is_of_low_dtype,
    may_be_of_low_dtype,
    takes_low,
    widened,
)
from cpulaunch.worker.ledger.chooser import ranks_in_job
from cpulaunch.worker.ledger.decision import PLAIN
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event, text_of
from cpulaunch.worker.tensors.kept import KeptTensors
from cpulaunch.worker.tensors.mutation import random_state, restore_random_state
from cpulaunch.worker.tensors.objects import Form, form_of, holds_objects, is_known, own_parts
from cpulaunch.worker.tensors.pytree import tensors_of
from cpulaunch.worker.tensors.references import ByIdentity

GRAPH, AUTOCAST, WEIGHTS = "graph", "autocast", "weights"
"""Next to PLAIN, the names of the modes, in reports too."""


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


def _residents(settings: TorchSettings) -> Any:
    """The resident weights of the process; None if the settings ask for none, or if they are unavailable."""
    if settings.weights is None and settings.precision != "bf16":
        return None
    try:
        from cpulaunch.worker.weights.resident import residents

        return residents(settings)
    except Exception as error:  # noqa: BLE001  The program continues without this setting.
        degraded(settings, "weights", f"resident weights are unavailable: {error}")
        return None


KEEPS = "it keeps tensors in objects between calls, whose types must stay the same"
RETURNS_LOW = "its results are in bf16 or fp16 by themselves"

MAX_FORMS = 16
"""Calls of so many forms of each module run in the program's own types, to see what they do with tensors."""


class _Knowledge:
    """What calls of a module do with tensors, as far as they have shown.

    `is_stateful`: no mode may change dtypes. `forms`: for each form of a call, whether it is known to leave no tensors
    behind; False if it has left some once, or may with a new hook. `hook`: the newest one, as of `hooked`.
    `only`: the one mode that does not fail.
    """

    __slots__ = ("forms", "hook", "hooked", "is_stateful", "only", "parts", "seen")

    def __init__(self, module: nn.Module, hooked: int) -> None:
        self.is_stateful = False
        self.forms: dict[Form, bool] = {}
        self.seen = 0
        self.hooked, self.hook = hooked, newest_hook(module)
        self.only: str | None = None
        self.parts = own_parts(module)


class CallModes:
    """Runs calls of modules in one of the modes. Each mode computes in the types that the settings allow.

    `state`: of the thread; its `unwrapped` says whether calls of submodules run without the wrapper. It is set back by
    `finally`, which no KeyboardInterrupt can keep from running, unlike an `__exit__`.
    `changed` is called when a module has fewer modes than before. `fastest_but`: of the modes other than one, which has
    been the fastest for such calls; None if that is not measured. `seconds_of`: how long a module's calls have taken.
    """

    def __init__(self, settings: TorchSettings, original: Any, state: Any) -> None:
        self._settings = settings
        self._original = original
        self._state = state
        self._precision = Precision(settings.precision, cpu_only=settings.level_precision)
        self.captures: Any = _captures(settings, self._precision)
        self.residents: Any = _residents(settings)
        self._known: ByIdentity[_Knowledge] = ByIdentity()
        self._hooked = 0
        if self._precision.dtype is not None:
            watch_hooks(self._count_hook)
        self.changed: Callable[[nn.Module], None] = lambda module: None
        self.seconds_of: Callable[[nn.Module], float] = lambda module: 0.0
        self.is_measured = False
        self.fastest_but: Callable[..., str | None] = lambda mode, module, args, kwargs: None

    def candidates(self, module: nn.Module) -> tuple[str, ...]:
        """The modes possible for calls of the module at the moment, the one expected to be best first.

        On other devices a call returns before it has ended, so that its duration says nothing: there is one mode,
        autocast if the user asks for it, not a level, and else plain. There is one, too, where the original weights are
        released: other modes would have to read them again.
        """
        only = self._only(module)
        if only is not None:
            return (only,)
        is_asked = self._settings.weights is not None
        has_state = self.is_stateful(module) and not module.training
        device = device_of(module)
        has_weights = device == "cpu" and self._has_residents(module)
        if has_weights and is_asked and self._settings.release_weights:
            return (WEIGHTS,)
        possible = {
            GRAPH: self.captures is not None and self.captures.can_capture(module),
            WEIGHTS: has_weights and is_asked,
            AUTOCAST: self._precision.applies(module),
        }
        if has_state and self._precision.applies(module):
            possible[AUTOCAST] = possible[GRAPH] = False
        modes = [mode for mode, is_possible in possible.items() if is_possible]
        if has_weights and not is_asked:
            modes.append(WEIGHTS)
        return (*modes, PLAIN) if device == "cpu" else (*modes, PLAIN)[:1]

    def in_trial(self, module: nn.Module) -> str:
        """The mode of calls that are compared with each other: the one expected to be best that takes no captures.

        It is not autocast where that is slow: nothing bounds how long these calls take.
        """
        modes = [mode for mode in self.candidates(module) if mode != GRAPH] or [PLAIN]
        if modes[0] == AUTOCAST and len(modes) > 1:
            from cpulaunch.worker.weights.form import bf16_is_fast

            return AUTOCAST if self._precision.dtype is torch.bfloat16 and bf16_is_fast() else modes[1]
        return modes[0]

    def _count_hook(self, part: nn.Module | None) -> None:
        self._hooked += 1

    def _knowledge(self, module: nn.Module) -> _Knowledge:
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = _Knowledge(module, self._hooked)
        return known

    def _only(self, module: nn.Module) -> str | None:
        known = self._known.get(module)
        return None if known is None else known.only

    def needs_care(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is the module's first call of its form, or the first that shows that it keeps tensors.

        Such an object holds tensors of the dtype of its call, which a call in another mode could not combine with its
        own: no mode may then change dtypes, and neither may the first call, whose result is still unknown.
        """
        if module.training or self._precision.dtype is None:
            return False
        known = self._knowledge(module)
        if known.is_stateful:
            return False
        if known.hooked != self._hooked and known.seen < MAX_FORMS:
            known.hooked, hook = self._hooked, known.hook
            known.hook = max(hook, newest_hook(module))
            if known.hook > hook:  # What the program sees of such calls is unknown again.
                known.forms = dict.fromkeys(known.forms, False)  # Tables that are made once have been made.
        if known.seen and holds_objects(args, kwargs):
            self._set_stateful(module, known, KEEPS)
            return True
        is_new = known.seen < MAX_FORMS and not known.forms.get(form_of(known.parts, args, kwargs))
        return is_new and device_of(module) == "cpu"

    def _set_stateful(self, module: nn.Module, known: _Knowledge, reason: str) -> None:
        known.is_stateful = True
        self.changed(module)
        report_event("eager", module=type(module).__name__, reason=reason)

    def is_stateful(self, module: nn.Module) -> bool:
        """Whether calls of the module are known to do with tensors what other dtypes would change."""
        known = self._known.get(module)
        return known is not None and known.is_stateful

    def first_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result in the program's own dtypes. Effect: learns whether the module keeps tensors in objects.

        Tensors that the first call leaves behind may be tables that are made once; those of the second are not.
        """
        kept, known = KeptTensors(), self._knowledge(module)
        known.parts = own_parts(module)
        form = form_of(known.parts, args, kwargs)
        result = self.run(WEIGHTS if self._has_residents(module) else PLAIN, module, args, kwargs)
        has_kept = kept.found(result, (args, kwargs))
        if has_kept and form not in known.forms and len(known.forms) < MAX_FORMS:
            known.forms[form] = False
            return result
        if has_kept or holds_objects(args, kwargs) or not is_known(result):
            self._set_stateful(module, known, KEEPS)
        elif self._returns_low(result, module, args, kwargs):
            self._set_stateful(module, known, RETURNS_LOW)
        known.forms[form] = True
        known.seen += 1
        return result

    def _returns_low(self, result: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a result in the program's own types has tensors in bf16 or fp16, which it is to keep."""
        if not any(each.dtype in LOW for each in tensors_of(result)):
            return False
        return self._precision.applies(module) and not takes_low(module, args, kwargs)

    def _has_residents(self, module: nn.Module) -> bool:
        if self.residents is None or module.training or torch.is_grad_enabled():
            return False
        return bool(self.residents.covers(module))

    def progress(self) -> int:
        """A number that changes when a call of this thread prepares a capture, or any call resident weights."""
        prepared = 0 if self.captures is None else self.captures.own.preparations
        return prepared if self.residents is None else prepared + int(self.residents.progress)

    def pending(self) -> int:
        """The number of this thread's calls so far that wait for a capture, or to pack weights."""
        return sum(each.own.pending for each in (self.captures, self.residents) if each is not None)

    def preparing_seconds(self) -> float:
        """How long this thread's captures and packing have taken so far, which have budgets of their own."""
        packing = 0.0 if self.residents is None else self.residents.own.preparing
        return float(packing if self.captures is None else packing + self.captures.own.seconds)

    def is_over(self, module: nn.Module, mode: str) -> bool:
        """Whether the mode has turned out to be impossible for the module."""
        return mode == GRAPH and self.captures.is_finished(module)

    def retire(self, module: nn.Module, lost: set[str]) -> set[str]:
        """Those of the modes that are over for this module, because they hold memory for it. Effect: frees that memory.

        Packed weights are held by both modes that read them.
        """
        over = lost & {GRAPH}
        if over:
            self.captures.retire(module, "calls without captured graphs are faster")
        packed = {WEIGHTS, AUTOCAST}.intersection(self.candidates(module))
        if packed <= lost and self._has_residents(module):
            self.residents.free(module)
            over |= packed
        return over

    def run(self, mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a top-level call in the mode.

        A program may combine tensors of autocast with others where torch does not convert them: in one call, or in what
        a module keeps between calls; or it may check dtypes itself. A call that fails for this is repeated in another
        dtype, in which all later ones run if it succeeds.
        """
        only = self._only(module)
        if self._precision.dtype is None or only is not None:
            return self._run_in(only or mode, module, args, kwargs)
        if takes_low(module, args, kwargs):
            return self._run(module, args, kwargs, try_submodules=False)
        drawn_from = random_state()
        try:
            return self._run_in(mode, module, args, kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            other, reason = self._mode_after(error, mode, module), text_of(error)
            if other is None:
                raise
        restore_random_state(drawn_from)
        repeat = self._in_autocast if other == AUTOCAST else self._run  # Not as `mode`, which may run this one again.
        result = repeat(module, args, kwargs, try_submodules=False)
        self._knowledge(module).only = other
        self.changed(module)
        report_event(
            "eager", module=type(module).__name__, reason=f"all calls are {other}, because of dtypes: {reason}"
        )
        return result

    def _mode_after(self, error: Exception, mode: str, module: nn.Module) -> str | None:
        """The mode in which to repeat a call that failed; None if its dtypes are not to blame."""
        if not self._precision.applies(module) or is_of_arguments(error, module):
            return None
        if isinstance(error, ValueError | AssertionError) and ranks_in_job() > 1:
            return None  # It may be of this rank's data, and the others do not repeat what it has sent.
        if mode in (AUTOCAST, GRAPH):
            return PLAIN if may_be_of_low_dtype(error) else None
        return AUTOCAST if is_of_low_dtype(error) else None

    def _run_in(self, mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if mode == PLAIN:
            return self._run(module, args, kwargs, try_submodules=False)
        if mode == GRAPH:
            return self._by_graph(module, args, kwargs)
        if not self._has_residents(module):
            return self._with_residents(mode, module, args, kwargs)
        is_free = self._only(module) is None  # Else it has no other mode while it waits.
        if is_free and self.residents.is_too_early(module, partial(self._measured_seconds, module)):
            return self.run(PLAIN, module, args, kwargs)
        if not self.residents.is_comparison_due(module):
            return self._active(mode, module, args, kwargs)
        return self.residents.accuracy.compare(
            module,
            (args, kwargs),
            lambda: self._active(mode, module, args, kwargs),
            lambda *given, **named: self._run(module, given, named, try_submodules=False),
        )

    def _active(self, mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result with the resident weights."""
        with self.residents.active(module, partial(self._measured_seconds, module)):
            return self._with_residents(mode, module, args, kwargs)

    def _measured_seconds(self, module: nn.Module) -> float:
        """How long the module's calls have taken so far; infinite if such calls are not measured."""
        return self.seconds_of(module) if self.is_measured and len(self.candidates(module)) > 1 else inf

    def _with_residents(self, mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if mode == AUTOCAST:
            return self._in_autocast(module, args, kwargs, try_submodules=False)
        return self._run(module, args, kwargs, try_submodules=False)

    def run_as_is(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a top-level call of a module of which nothing can be found out."""
        return self._run(module, args, kwargs, try_submodules=False)

    def run_submodule(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call inside another one: of a module that could not be captured as a whole, or by a signal
        handler, a destructor, or a method that the wrapper calls.
        """
        if self.captures is None or not self.captures.is_large_enough(module):
            return self._run(module, args, kwargs, try_submodules=True)
        return self._capturing(
            module,
            args,
            kwargs,
            lambda try_submodules: self._run(module, args, kwargs, try_submodules=try_submodules),
            outermost=False,
        )

    def _by_graph(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result by a captured graph; in autocast where there is none, as it is captured in autocast.

        A call that waits for its capture runs in the fastest other mode: in autocast it may take many times as long.
        """
        pending = self.pending()

        def eager(try_submodules: bool) -> Any:
            mode = None if self.pending() == pending else self.fastest_but(GRAPH, module, args, kwargs)
            if mode is not None:
                return self.run(mode, module, args, kwargs)  # What fails in it for its dtypes may not in autocast.
            return self._in_autocast(module, args, kwargs, try_submodules=try_submodules)

        return self._capturing(module, args, kwargs, eager, outermost=True)

    def _capturing(self, module: nn.Module, args: Any, kwargs: Any, eager: Any, *, outermost: bool) -> Any:
        state = self._state
        before, state.unwrapped = state.unwrapped, True
        try:
            return self.captures.call(module, args, kwargs, eager, outermost=outermost)
        finally:
            state.unwrapped = before

    def _in_autocast(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, try_submodules: bool
    ) -> Any:
        """The eager result in the precision of the settings, as fp32."""
        with ExitStack() as contexts:
            mode = self._precision.enter(contexts, module)
            result = self._run(module, args, kwargs, try_submodules=try_submodules)
        return widened(result) if mode.widen else result

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, try_submodules: bool) -> Any:
        state = self._state
        before, state.unwrapped = state.unwrapped, not try_submodules
        try:
            return self._original(module, *args, **kwargs)
        finally:
            state.unwrapped = before
