"""Hooks of modules, which see arguments and results of parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold its hooks."""

REGISTERING = (
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_backward_hook"),
)
"""Methods of modules that add one."""

GLOBALLY = (
    *("register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"),
    *("register_module_full_backward_pre_hook", "register_module_backward_hook"),
)
"""Functions that add one to all modules."""

_watchers: list[Callable[[nn.Module | None], None]] = []


def has_hooks(module: nn.Module) -> bool:
    """Whether a part of the module, itself excepted, has a hook, or all modules have one.

    A hook of the module itself sees what its caller sees.
    """
    if any(getattr(torch_module, f"_global{kind}", None) for kind in KINDS):
        return True
    return any(getattr(part, kind, None) for part in module.modules() if part is not module for kind in KINDS)


def newest_hook(module: nn.Module) -> int:
    """The highest number of the hooks that see calls of the module and its parts, as far as it tells which these are.

    torch numbers all hooks of a process as they are registered.
    """
    hooks = [getattr(torch_module, f"_global{kind}", ()) for kind in KINDS]
    with suppress(Exception):  # A class may override `modules`.
        hooks += [getattr(part, kind, ()) for part in module.modules() for kind in KINDS]
    return max((number for each in hooks for number in each if isinstance(number, int)), default=-1)


def watch_hooks(watcher: Callable[[nn.Module | None], None]) -> None:
    """Effect: `watcher` is called with each module that gets a hook from now on, None for all modules."""
    if not _watchers:
        for name in REGISTERING:
            if hasattr(nn.Module, name):
                setattr(nn.Module, name, _telling(getattr(nn.Module, name), is_method=True))
        for name in GLOBALLY:
            if hasattr(torch_module, name):
                setattr(torch_module, name, _telling(getattr(torch_module, name), is_method=False))
    _watchers.append(watcher)


def _telling(plain: Callable[..., Any], *, is_method: bool) -> Callable[..., Any]:
    @wraps(plain)
    def register(*args: Any, **kwargs: Any) -> Any:
        part = (args[0] if args else kwargs.get("self")) if is_method else None
        if part is not None or not is_method:
            for watcher in _watchers:
                watcher(part)
        return plain(*args, **kwargs)

    return register
