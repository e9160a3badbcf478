"""torch's debugging aids, doing nothing: anomaly detection, emit_nvtx and emit_itt, gradcheck and gradgradcheck.

Classes keep their identity and signature, and only what they do is taken out: a program that has imported one by
name, or subclassed it, is meant too.
"""

from __future__ import annotations

import sys
from functools import wraps

import torch

from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def switch_off(settings: TorchSettings) -> str:
    """Effect: the aids do nothing in this process, also where the program switches them on."""
    for holder, name, nothing in _SILENT:
        _replace(_found(holder), name, nothing)
    for name in ("gradcheck", "gradgradcheck"):
        for holder in ("torch.autograd", "torch.autograd.gradcheck"):
            _replace(sys.modules[holder], name, _agree)
    return "anomaly detection, emit_nvtx, emit_itt, gradcheck do nothing"


def _begin_detection(self: Any, check_nan: bool = True) -> None:
    """detect_anomaly without its warning that the program becomes slow."""
    self.prev = torch.is_anomaly_enabled()
    self.check_nan = check_nan
    self.prev_check_nan = torch.is_anomaly_check_nan_enabled()


def _set_nothing(mode: bool, check_nan: bool = True) -> None:
    return None


def _enter(self: Any) -> Any:
    return self if self.enabled else None


def _leave(self: Any, *exception: object) -> bool | None:
    return False if self.enabled else None


def _agree(*arguments: object, **named: object) -> bool:
    """What a check says of right gradients."""
    return True


_SILENT: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("torch", "set_anomaly_enabled", _set_nothing),  # Both classes of anomaly_mode.py switch through it.
    ("torch.autograd.anomaly_mode.detect_anomaly", "__init__", _begin_detection),
    ("torch.autograd.profiler.emit_nvtx", "__enter__", _enter),
    ("torch.autograd.profiler.emit_nvtx", "__exit__", _leave),
    ("torch.autograd.profiler.emit_itt", "__enter__", _enter),
    ("torch.autograd.profiler.emit_itt", "__exit__", _leave),
)
"""What holds it, its name, and what stands in for it."""


def _found(path: str) -> Any:
    """The module or class of this name. Raises: AttributeError if a future torch has it no more."""
    held: Any = torch
    for name in path.split(".")[1:]:
        held = getattr(held, name)
    return held


def _replace(holder: Any, name: str, nothing: Callable[..., Any]) -> None:
    """Effect: the function does nothing, under its own name and signature."""
    original = getattr(holder, name)

    @wraps(original)
    def silent(*arguments: Any, **named: Any) -> Any:
        return nothing(*arguments, **named)

    setattr(holder, name, silent)
