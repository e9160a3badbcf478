"""How far the results of a program's own first calls are from those in its own precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.worker.reporting.events import report_event, text_of
from cpulaunch.worker.tensors.mutation import random_state, restore_random_state
from cpulaunch.worker.tensors.pytree import UnknownStructureError, flatten
from cpulaunch.worker.tensors.references import ByIdentity

MEASURED_CALLS = 2
"""Calls of each module that are compared: each costs one more call in the program's own precision."""

LIBRARIES = ("torch.nn.modules.", "torchvision.", "transformers.", "timm.")
"""Modules of these may run twice: they change nothing but themselves and their arguments. A program's own `forward` may
print, count or append to a list, and torch's parallel modules exchange messages."""


@record
class Difference:
    """Of two results: largest and rms difference relative to the rms of the expected one, and equal arg-maxima.

    `argmax_agreement` is the share of rows (last dimension) of the first floating-point tensor, 0 to 1; None if it has
    no such rows.
    """

    largest: float
    rms: float
    argmax_agreement: float | None


class Accuracy:
    """Compares the first calls of each module in lower precision with plain ones, and reports the differences."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._left: ByIdentity[int] = ByIdentity()
        self._states: ByIdentity[tuple[Any, Any]] = ByIdentity()

    def is_due(self, module: nn.Module) -> bool:
        """Whether the next call of the module is to be compared, which runs it twice: its last call left no trace.

        Effect: remembers the module's state, to be compared at the next call.
        """
        if self._remaining(module) <= 0:
            self._states.discard(module)
            return False
        if not all(map(_may_repeat, module.modules())):
            self._left[module] = 0
            self._report(module, reason="not measured: its own code would run twice")
            return False
        before, state = self._states.get(module), _state(module)
        self._states[module] = state
        if before is not None and before[0] == state[0] and not _has_hooks(module):
            return True
        if before is not None:
            self._left[module] = 0
        return False

    def compare(self, module: nn.Module, arguments: Any, run: Callable[[], Any], plain: Callable[..., Any]) -> Any:
        """The result of `run`. Effect: reports how it differs from `plain(*args, **kwargs)` with copied arguments.

        The copies are made before, because a call may change its arguments, such as a key-value cache. The random state
        is that of a single call. Nothing is reported for arguments that cannot be copied.
        """
        self._left[module] = self._remaining(module) - 1
        expected: Any = None
        try:
            _check_library_objects(arguments)
            args, kwargs = copy.deepcopy(arguments)
            expected = _repeatable(lambda: plain(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  The comparison must not become an error of the program.
            self._left[module] = 0
            self._report(module, reason=f"not measured: {text_of(error)}")
        # Not inside `except`, where an error of the program would get that one as its context.
        result = run()
        found = None if expected is None else difference(expected, result)
        if found is not None:
            self._report(
                module,
                error_max=float(f"{found.largest:.3g}"),
                error_rms=float(f"{found.rms:.3g}"),
                argmax_agreement=found.argmax_agreement,
            )
        return result

    def _remaining(self, module: nn.Module) -> int:
        left = self._left.get(module)
        return MEASURED_CALLS if left is None else left

    def _report(self, module: nn.Module, **found: Any) -> None:
        report_event("accuracy", module=type(module).__name__, type=self._kind, **found)


def _may_repeat(part: nn.Module) -> bool:
    """Whether the part's class is of one of LIBRARIES, and no function among its attributes is the program's."""
    if not f"{type(part).__module__}.".startswith(LIBRARIES) or "forward" in vars(part):
        return False
    kept = [value for value in vars(part).values() if isinstance(value, FunctionType | MethodType | partial)]
    functions = [value.func if isinstance(value, partial) else value for value in kept]
    return all(f"{each.__module__}.".startswith(("torch.", "torchvision.", "transformers.")) for each in functions)


def _check_library_objects(value: Any) -> None:
    """Raises: TypeError for an object of the program's own class, whose methods would run twice too."""
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _check_library_objects(item)
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch", "transformers"):
        raise TypeError(f"it is given an object of type {type(value).__name__}")


def _state(module: nn.Module) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """Marks of all attributes of the module and its parts, equal if none has changed, and the tensors among them.

    Tensors are kept alive with the marks, so that no other one gets the same identity.
    """
    marks: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for part in module.modules():
        for name, value in (*vars(part).items(), *part._buffers.items()):
            if isinstance(value, Tensor):
                tensors.append(value)
                marks.append((name, id(value), None if value.is_inference() else value._version))
            elif type(value) in (int, float, str, bool):
                marks.append((name, value))
            else:
                marks.append((name, id(value), len(value) if isinstance(value, list | dict | set) else 0))
    return marks, tensors


def _has_hooks(module: nn.Module) -> bool:
    """Whether the program's own functions run in calls of the module, which may count or collect."""
    every = torch.nn.modules.module
    own = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return own or bool(every._global_forward_hooks or every._global_forward_pre_hooks)


def _repeatable(call: Callable[[], Any]) -> Any:
    """The result of the call. Effect: none on torch's random state, unless other threads may draw from it too."""
    state = random_state()
    try:
        return call()
    finally:
        restore_random_state(state)


def difference(expected: Any, got: Any) -> Difference | None:
    """How the floating-point tensors of two results differ; None if there are none, or the structures differ."""
    pairs = _pairs(expected, got)
    if not pairs:
        return None
    count = sum(one.numel() for one, _ in pairs)
    squares = sum(float(one.square().sum()) for one, _ in pairs)
    scale = (squares / count) ** 0.5 or 1.0
    errors = [(one - other).abs() for one, other in pairs]
    rms = (sum(float(error.square().sum()) for error in errors) / count) ** 0.5
    return Difference(
        largest=max(float(error.max()) for error in errors) / scale,
        rms=rms / scale,
        argmax_agreement=_argmax_agreement(*pairs[0]),
    )


def _pairs(expected: Any, got: Any) -> list[tuple[Tensor, Tensor]]:
    """The floating-point tensors of both results as fp64, in order, without those that hold NaN or infinity."""
    ones: list[Tensor] = []
    others: list[Tensor] = []
    try:
        flatten(expected, ones)
        flatten(got, others)
    except UnknownStructureError:
        return []
    if any(tensor.is_nested for tensor in (*ones, *others)):  # They have no shape.
        return []
    if [one.shape for one in ones] != [other.shape for other in others]:
        return []
    wide = [
        (one.detach().double(), other.detach().double())
        for one, other in zip(ones, others, strict=True)
        if one.is_floating_point() and other.is_floating_point() and one.numel()
    ]
    return [(one, other) for one, other in wide if bool(one.isfinite().all()) and bool(other.isfinite().all())]


def _argmax_agreement(expected: Tensor, got: Tensor) -> float | None:
    if not expected.dim() or expected.shape[-1] < 2:
        return None
    return round(float((expected.argmax(-1) == got.argmax(-1)).double().mean()), 4)
