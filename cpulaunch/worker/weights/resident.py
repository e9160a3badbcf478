"""`--weights`, and what `--precision bf16` does for calls in eval mode: weights kept in another type, cast once."""

from __future__ import annotations

import math
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter as _clock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.tensors.access import watch_access
from cpulaunch.worker.tensors.foreign import is_foreign
from cpulaunch.worker.tensors.owners import is_held_elsewhere, own_view
from cpulaunch.worker.tensors.references import ByIdentity, allow_swaps, at_end
from cpulaunch.worker.weights.accuracy import Accuracy
from cpulaunch.worker.weights.entry import ResidentWeight
from cpulaunch.worker.weights.functions import Replaced, plain_linear
from cpulaunch.worker.weights.norms import Norms
from cpulaunch.worker.weights.release import release

MIN_ELEMENTS = 1 << 14
"""Smaller weights stay in the CPU's caches: reading them costs less than any other form saves."""

FREE_SECONDS = 0.5
"""Making forms of a module takes no longer than that and its calls so far: a program that ends sooner pays little."""

_is_autocast = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype

NOTED_LAYERS = 8
"""So many layers that are kept in a higher type are named in a report."""


def residents(settings: TorchSettings) -> ResidentWeights | None:
    """The resident weights that the settings ask for; None if they ask for none."""
    kind = settings.weights or ("bf16" if settings.precision == "bf16" else None)
    return None if kind is None else ResidentWeights(kind, settings)


Seconds = Callable[[], float]
"""How long the calls of a module have taken so far; infinite if they are not measured."""


class _Packing(threading.local):
    """What the calls of one thread have packed.

    `call`: the module that is being called, and how long its calls have taken so far. `is_waiting`: the call has left
    forms to be made later. `preparing`: seconds that making forms took. `pending`: how many calls were waiting.
    """

    call: tuple[nn.Module, Seconds] | None = None
    is_waiting = False
    preparing = 0.0
    pending = 0


class ResidentWeights:
    """All resident weights of a process, in the type `kind`, within the limit of memory in the settings.

    `progress` counts calls that took longer because they made a form or were compared with plain ones.
    """

    def __init__(self, kind: str, settings: TorchSettings) -> None:
        self.kind = kind
        self._settings = settings
        self._limit_bytes = settings.graph_memory_bytes
        self._releases = settings.release_weights
        self._released_bytes = 0
        self._weights: dict[int, ResidentWeight | None] = {}
        self._references: set[int] = set()
        self._refused: set[int] = set()
        self._casts: dict[int, Cast] = {}
        self._covered: ByIdentity[bool] = ByIdentity()
        self._spent: ByIdentity[float] = ByIdentity()
        self._waiting: ByIdentity[bool] = ByIdentity()
        self.own = _Packing()
        self._norms = Norms()
        self.accuracy = Accuracy(kind)
        self.progress = 0
        self._lock = threading.Lock()
        self._new: list[tuple[ResidentWeight, int]] = []
        allow_swaps()

    @property
    def bytes(self) -> int:
        """Memory of all forms and casts besides the original weights, in bytes."""
        forms = (entry.form for entry in tuple(self._weights.values()) if entry is not None)
        casts = sum(cast.low.nbytes for cast in tuple(self._casts.values()))
        return sum(form.bytes for form in forms if form is not None) + casts

    def covers(self, module: nn.Module) -> bool:
        """Whether the module has weights that may become resident. It is found out once for each module.

        A lazy module makes its weights in its first call.
        """
        known = self._covered.get(module)
        if known is None:
            with suppress(Exception):  # A class may override `parameters`.
                if any(map(is_lazy, module.parameters())):
                    return False
                known = any(is_eligible(weight) and not is_foreign(weight) for weight in module.parameters())
            self._covered[module] = known = bool(known)
            if known:
                self._norms.add(module)
        return known

    def is_comparison_due(self, module: nn.Module) -> bool:
        """Whether the result of the module's next call is to be compared with a plain one: forms are in use."""
        if (
            self.kind == "fp32" or not self.progress or module in self._waiting or not self.accuracy.is_due(module)
        ):  # Which looks at all parts.
            return False
        self.progress += 1  # A compared call takes longer.
        return True

    def is_too_early(self, module: nn.Module, seconds: Seconds) -> bool:
        """Whether forms of the module are left to be made, and still too costly. Effect: counts a call that waits."""
        is_waiting = module in self._waiting and not self._affords(module, seconds)
        self.own.pending += is_waiting
        return is_waiting

    def _affords(self, module: nn.Module, seconds: Seconds) -> bool:
        return (self._spent.get(module) or 0.0) < FREE_SECONDS + seconds()

    def active(self, module: nn.Module, seconds: Seconds = lambda: math.inf) -> Replaced:
        """A context in which this thread's products use the resident weights. Effect: reports new forms at its end."""
        self.own.call, self.own.is_waiting = (module, seconds), False
        return Replaced(self, partial(self._end, module))

    def _end(self, module: nn.Module) -> None:
        self.own.call = None
        if self.own.is_waiting:
            self.own.pending += 1
            self._waiting[module] = True
        elif self._waiting:
            self._waiting.discard(module)
        if self._new:
            self._report(module)

    def linear(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *, transposed: bool) -> Tensor | None:
        """The product with the weight, in its resident form; None: torch must compute it."""
        key = id(weight)
        entry = self._weights[key] if key in self._weights else self._admit(weight, transposed=transposed)
        if entry is None or entry.transposed is not transposed:
            return None
        autocast = _autocast_dtype("cpu") if _is_autocast("cpu") else None
        if bias is None:
            y = entry.repeated(x, weight, autocast)
            if y is not None:
                return y
        if x.dtype not in _INPUTS:
            return None
        form = entry.valid_form(weight)
        if not entry.accepts(x, bias, is_autocast=autocast is not None):
            return None
        if form is None:
            return self._make(entry, weight, x, bias) if entry.is_due(weight) and x.numel() else None
        if bias is None:
            entry.note_product(x, form, autocast)
        return form.multiply(x, bias, plain_linear)

    def _admit(self, weight: nn.Parameter, *, transposed: bool) -> ResidentWeight | None:
        """The entry of a weight that is used for the first time; None if it cannot be resident."""
        key = id(weight)
        fits = weight.dim() == 2 and weight.is_contiguous() and is_eligible(weight) and not is_foreign(weight)
        entry = ResidentWeight(weight, self.kind, transposed=transposed) if fits else None
        self._weights[key] = entry
        self._refer(weight)
        return entry

    def _refer(self, weight: Tensor) -> None:
        """Effect: what is kept for the weight is forgotten with it."""
        key = id(weight)
        if key not in self._references:
            self._references.add(key)
            at_end(weight, partial(self._forget, key))

    def _forget(self, key: int) -> None:
        self._weights.pop(key, None)
        self._casts.pop(key, None)
        self._references.discard(key)
        self._refused.clear()

    def free(self, module: nn.Module) -> None:
        """Effect: drops the forms and casts of the module's weights; they are made again if they are used again."""
        for weight in module.parameters():
            self._casts.pop(id(weight), None)
            entry = self._weights.get(id(weight))
            if entry is not None:
                entry.free()
        self._refused.clear()

    def _make(self, entry: ResidentWeight, weight: nn.Parameter, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if not self._has_room(weight) or is_foreign(weight):
            return None
        call = self.own.call
        if call is not None and not self._affords(*call):
            self.own.is_waiting = True
            return None
        if not is_eligible(weight) or not self._lock.acquire(blocking=False):  # It may have moved to shared memory.
            return None
        started = _clock()
        try:
            y = entry.make(weight, x, bias, plain_linear)
        finally:
            self._lock.release()
        seconds = _clock() - started
        self.own.preparing += seconds
        if call is not None:
            self._spent[call[0]] = (self._spent.get(call[0]) or 0.0) + seconds
        if entry.form is None:
            return y
        self.progress += 1
        self._new.append((entry, weight.numel() * weight.element_size()))
        if self._releases and entry.form.kind != "fp32" and entry.form.bytes:
            self._release(weight)
        return y

    def _has_room(self, weight: Tensor) -> bool:
        """Whether the limit of memory allows for a copy of the weight; if not, that stays so until some is freed."""
        if self._limit_bytes is None or id(weight) in self._refused:
            return self._limit_bytes is None
        if self.bytes + weight.nbytes > self._limit_bytes:
            self._refused.add(id(weight))
            return False
        return True

    def _release(self, weight: nn.Parameter) -> None:
        """Effect: maps the weight's memory from a file; a failure ends all releasing."""
        try:
            self._released_bytes += release(weight, tempfile.gettempdir())
        except OSError as error:
            self._releases = False
            degraded(self._settings, "release_weights", str(error))

    def low(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        """The weight in autocast's dtype, cast once while it does not change; None if it is not eligible."""
        if not is_eligible(weight):
            return None
        key = id(weight)
        cast = self._casts.get(key)
        if cast is None or not cast.holds(weight, dtype):
            self._casts.pop(key, None)
            if not self._has_room(weight) or is_foreign(weight) or is_held_elsewhere(weight):
                return None
            self._refer(weight)
            cast = self._casts[key] = Cast(weight, dtype)
        return cast.low

    def norm(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The result of a recognized norm of a few rows; None if torch must compute it."""
        return self._norms.compute(module, x)

    def _report(self, module: nn.Module) -> None:
        """Effect: reports the forms made in a call of the module: their types, memory and errors."""
        new, self._new = self._new, []
        released, self._released_bytes = self._released_bytes, 0
        losses = [entry.loss for entry, _ in new if entry.loss is not None]
        higher = [
            f"{loss.layer}: {loss.kind}, as {self.kind} has an error of {loss.rejected:.1%}"
            for loss in losses
            if loss.kind != self.kind
        ]
        report_event(
            "weights",
            module=type(module).__name__,
            type=self.kind,
            layers=len(losses),
            kinds=dict(Counter(loss.kind for loss in losses)),
            bytes_before=sum(before for _, before in new),
            bytes_after=sum(entry.form.bytes for entry, _ in new if entry.form is not None),
            layer_error_rms=round(math.sqrt(sum(loss.error**2 for loss in losses) / max(len(losses), 1)), 6),
            layer_error_max=round(max((loss.error for loss in losses), default=0.0), 6),
            kept=higher[:NOTED_LAYERS],
            bytes_released=released,
        )


class Cast:
    """A weight cast to a dtype of autocast, valid while the weight does not change."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.low = own_view(weight).to(dtype)
        self.changed = False
        self._state = (weight._version, weight.data_ptr(), dtype)
        watch_access(self, [weight])

    def holds(self, weight: nn.Parameter, dtype: torch.dtype) -> bool:
        """Whether the weight is as it was when it was cast, and the dtype is this one."""
        return not self.changed and self._state == (weight._version, weight.data_ptr(), dtype)


_INPUTS = (torch.float32, torch.bfloat16)


def is_eligible(weight: Tensor) -> bool:
    """Whether a weight is a dense parameter on the CPU, in fp32 or bf16, whose changes can be noticed.

    Those in shared memory can be changed by other processes.
    """
    if weight.device.type != "cpu" or weight.dtype not in _INPUTS or weight.numel() < MIN_ELEMENTS:
        return False
    return weight.layout is torch.strided and not weight.is_inference() and not weight.is_shared()
