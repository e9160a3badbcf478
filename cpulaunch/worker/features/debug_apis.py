"""Disables torch's debugging aids: anomaly detection, emit_nvtx and emit_itt, gradcheck and gradgradcheck.

Only methods of the classes are replaced, so that programs that imported a class by name or subclassed it are covered
too. Functions and methods keep their signatures.
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


def disable(settings: TorchSettings) -> str:
    """Effect: the debugging aids do nothing in this process, even if the program enables them."""
    for owner, name, replacement in _REPLACEMENTS:
        _replace(_lookup(owner), name, replacement)
    for name in ("gradcheck", "gradgradcheck"):
        for owner in ("torch.autograd", "torch.autograd.gradcheck"):
            _replace(sys.modules[owner], name, _pass_check)
    return "anomaly detection, emit_nvtx, emit_itt, gradcheck do nothing"


def _begin_detection(self: Any, check_nan: bool = True) -> None:
    """detect_anomaly.__init__ without its warning that the program becomes slow."""
    self.prev = torch.is_anomaly_enabled()
    self.check_nan = check_nan
    self.prev_check_nan = torch.is_anomaly_check_nan_enabled()


def _ignore_mode(mode: bool, check_nan: bool = True) -> None:
    return None


def _enter(self: Any) -> Any:
    return self if self.enabled else None


def _exit(self: Any, *exception: object) -> bool | None:
    return False if self.enabled else None


def _pass_check(*arguments: object, **named: object) -> bool:
    """The result of a gradient check that passes."""
    return True


_REPLACEMENTS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("torch", "set_anomaly_enabled", _ignore_mode),  # Both classes of anomaly_mode.py call it.
    ("torch.autograd.anomaly_mode.detect_anomaly", "__init__", _begin_detection),
    ("torch.autograd.profiler.emit_nvtx", "__enter__", _enter),
    ("torch.autograd.profiler.emit_nvtx", "__exit__", _exit),
    ("torch.autograd.profiler.emit_itt", "__enter__", _enter),
    ("torch.autograd.profiler.emit_itt", "__exit__", _exit),
)
"""Module or class, name of its function, and the replacement."""


def _lookup(path: str) -> Any:
    """The module or class of this name. Raises: AttributeError if a future torch lacks it."""
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Effect: replaces the function, keeping its name and signature."""

    @wraps(getattr(owner, name))
    def replaced(*arguments: Any, **named: Any) -> Any:
        return replacement(*arguments, **named)

    setattr(owner, name, replaced)
