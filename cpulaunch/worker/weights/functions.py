"""torch's functions that take weights, replaced during calls of modules with resident weights.

The functions are replaced only while such a call runs, so that torch.jit.script and torch.compile outside of calls see
torch's own; in other threads the replaced functions call torch's own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial, update_wrapper, wraps
from importlib import import_module
from operator import getitem
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import forward_ad


class Store(Protocol):
    """The resident weights of a process."""

    def linear(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *, transposed: bool) -> Tensor | None:
        """The product with a resident weight; None if the weight is not resident."""
        ...

    def low(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        """The weight cast to autocast's dtype once; None if it is not resident."""
        ...

    def norm(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The result of a recognized norm; None if torch must compute it."""
        ...


class _ActiveStore(threading.local):
    store: Store | None = None


class _InPlace(partial[Any]):
    """A function in place of one of torch's, as which it is pickled and copied: a program may keep it."""

    def __reduce__(self) -> Any:
        return getitem, ((vars(self)["__wrapped__"],), 0)


def _in_place_of(plain: Any, function: Callable[..., Any]) -> Any:
    made = _InPlace(function)
    return update_wrapper(made, plain)


_thread = _ActiveStore()
_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch.is_autocast_enabled
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_function_modes = getattr(torch._C, "_len_torch_function_stack", int)

plain_linear: Any = F.linear
_plain_addmm: Any = torch.addmm
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def _store(x: Any, weight: Any = None) -> Store | None:
    """The store of the call that this thread is in, if an operation on x may use it; None otherwise."""
    if _is_dynamo_compiling():  # First, because torch.compile traces this function.
        return None
    store = _thread.store
    if store is None or type(x) is not Tensor or _is_grad_enabled():
        return None
    if weight is not None and type(weight) is not nn.Parameter:
        return None
    if _tracing_state() is not None or _dispatch_modes() or _transforms() is not None:
        return None
    if getattr(forward_ad, "_current_level", -1) >= 0 or (_function_modes() and _has_own_modes()):
        return None
    # The values of x lie in CPU memory as they are: it is not sparse, nested, a negated view or zeros without memory.
    is_plain = x.is_cpu and x.layout is torch.strided and not (x.is_nested or x.is_neg() or x._is_zerotensor())
    return store if is_plain else None


def _has_own_modes() -> bool:
    """Whether the program intercepts torch's functions with a mode other than that of a default device."""
    modes = getattr(torch.overrides, "_get_current_function_mode_stack", None)
    return modes is None or any(type(mode).__name__ != "DeviceContext" for mode in modes())


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  torch's name
    store = _store(input, weight)
    if store is not None:
        y = store.linear(input, weight, bias, transposed=False)
        if y is not None:
            return y
    return plain_linear(input, weight, bias)


def _addmm(*given: Any, **options: Any) -> Any:
    """As torch.addmm, which takes beta and alpha by position too."""
    if len(given) == 3 and not options:
        added, x, weight = given
        store = _store(x, weight)
        if store is not None and isinstance(added, Tensor) and added.dim() == 1 and x.dim() == 2:
            y = store.linear(x, weight, added, transposed=True)
            if y is not None:
                return y
    return _plain_addmm(*given, **options)


def _convolution(name: str) -> Callable[..., Any]:
    plain: Any = getattr(F, name)

    def convolution(input: Any, weight: Any, *rest: Any, **options: Any) -> Any:  # noqa: A002  torch's name
        store = _store(input, weight)
        if store is not None and _is_autocast("cpu"):
            low = store.low(weight, torch.get_autocast_dtype("cpu"))
            if low is not None:
                return plain(input, low, *rest, **options)
        return plain(input, weight, *rest, **options)

    return convolution


_replaced: list[tuple[Any, str, Any, Any]] = [
    (F, "linear", _in_place_of(plain_linear, _linear), plain_linear),
    (torch, "addmm", _in_place_of(_plain_addmm, _addmm), _plain_addmm),
    *((F, name, _in_place_of(getattr(F, name), _convolution(name)), getattr(F, name)) for name in _CONVOLUTIONS),
]
"""Owner, name, replacement and original of each replaced function."""


def _make_scriptable() -> None:
    """Effect: torch.jit.script takes replaced functions as built in, too, which it knows by their identity."""
    with suppress(ImportError, AttributeError):
        register = import_module("torch.jit._builtins")._register_builtin
        for owner, name, function, _ in _replaced:
            if owner in (F, torch):
                register(function, f"aten::{name}")


_make_scriptable()

MAX_REPLACED = 64
"""A program may make a class for each model, and each one that is replaced here is kept and costs time at each call."""

_in_force: list[tuple[Any, str, Any, Any, bool]] = []
"""Those that are replaced at the moment, and whether the owner has the function itself: a class may inherit it."""

_lock = threading.RLock()
"""A signal handler or a destructor, which may run at any place, may call a module."""

_active: set[Replaced] = set()
"""The contexts that are open, in all threads."""


def _begin_again() -> None:
    """Effect: in a forked child, which has none of the other threads, forgets their calls and their lock."""
    global _lock
    _lock = threading.RLock()
    _active.intersection_update([each for each in _active if each.thread == threading.get_ident()])
    if not _active:
        _restore()


def _replace() -> None:
    for owner, name, function, original in _replaced:
        if getattr(owner, name) is original:
            _in_force.append((owner, name, function, original, name in vars(owner)))
            setattr(owner, name, function)


def _restore() -> None:
    for owner, name, function, original, is_own in _in_force:
        if vars(owner).get(name) is function:
            setattr(owner, name, original) if is_own else delattr(owner, name)
    _in_force.clear()


os.register_at_fork(after_in_child=_begin_again)


def replace_forward(kind: type, plain: Callable[..., Any]) -> None:
    """Effect: from the next call on, `forward` of this class of norms is replaced during calls."""

    @wraps(plain)  # torch.jit.script reads the source of what is wrapped.
    def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
        store = _store(given[0]) if len(given) == 1 and not options else None
        if store is not None:
            y = store.norm(self, given[0])
            if y is not None:
                return y
        return plain(self, *given, **options)

    with _lock:
        if len(_replaced) < MAX_REPLACED and not any(owner is kind for owner, *_ in _replaced):
            _replaced.append((kind, "forward", forward, plain))


class Replaced:
    """A context in which torch's functions use the weights of a store, in this thread. `at_end` is called last.

    A thread is in one such context at most: another one of it is of a call whose __exit__ was interrupted.
    """

    __slots__ = ("_at_end", "_store", "thread")

    def __init__(self, store: Store, at_end: Callable[[], object]) -> None:
        self._store = store
        self._at_end = at_end

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        try:
            with _lock:
                _active.difference_update([each for each in _active if each.thread == self.thread])
                _active.add(self)
                if not _in_force:
                    _replace()
            _thread.store = self._store
        except BaseException:  # No __exit__ follows, not even after a KeyboardInterrupt.
            self._leave()
            raise

    def __exit__(self, *details: object) -> None:
        self._leave()
        self._at_end()

    def _leave(self) -> None:
        _thread.store = None
        with _lock:
            _active.discard(self)
            if not _active:
                _restore()
