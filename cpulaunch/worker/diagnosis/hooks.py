"""Hooks on what a program calls in every step: modules, optimizers, backward passes, DataLoaders and collectives.

Each costs a fraction of a microsecond in calls that are no steps.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import wraps
from importlib import import_module
from time import perf_counter, thread_time
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from cpulaunch.worker.diagnosis.activity import Activity
from cpulaunch.worker.graph.dynamo import hide_from_dynamo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
    *("all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather"),
    *("scatter", "barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
"""Functions of torch.distributed that may wait for other ranks."""


MOST_DEPTH = 8
"""Of lists in a batch."""


TORCH_CALL = ("_compiled_call_impl", "_call_impl")
"""The names that nn.Module.__call__ uses, if it is torch's own and does only what is done here without calling it.

Source: torch/nn/modules/module.py, Module._wrapped_call_impl.
"""


LOSSES = ("loss", "criterion")
"""How names of classes end that compute losses."""


class _Depth(threading.local):
    inside = False


def hook_modules(activity: Activity, ended: Callable[[str, object, float], None]) -> None:
    """Effect: replaces nn.Module.__call__. `ended` is called after each outermost call, with its seconds."""
    original: Any = nn.Module.__call__
    depth = _Depth()
    is_compiling = torch.compiler.is_compiling

    is_torchs = getattr(getattr(original, "__code__", None), "co_names", ()) == TORCH_CALL

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if depth.inside or is_compiling():
            if is_torchs and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return original(self, *args, **kwargs)
        depth.inside = True
        region = None if activity.record is None else activity.record(_region_of(self))
        if region is not None:
            region.__enter__()
        start = perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            depth.inside = False
            if region is not None:
                region.__exit__(None, None, None)
            ended("module", id(self), perf_counter() - start)

    hide_from_dynamo(__call__)
    nn.Module.__call__ = __call__


def _region_of(module: Any) -> str:
    """The name of the module's region: one without weights, such as a loss, is a function and no model."""
    with suppress(Exception):  # A program may have a method of its own with this name.
        if next(module.parameters(), None) is None and not _has_other_weights(module):
            return "cpulaunch::function"
    return "cpulaunch::module"


def _has_other_weights(module: Any) -> bool:
    """Whether a module without parameters has its weights elsewhere: in buffers, packed, or frozen into a script.

    A loss has weights of classes in a buffer, and is a function all the same.
    """
    is_script = isinstance(module, torch.jit.ScriptModule)
    name = module.original_name if is_script else type(module).__name__
    if name.lower().endswith(LOSSES):
        return False
    return is_script or next(module.buffers(), None) is not None or any(map(_is_packed, module.modules()))


def _is_packed(module: Any) -> bool:
    """Whether a module has weights that only operators of torch read, as quantized ones have."""
    return any(isinstance(each, torch.ScriptObject) for each in vars(module).values())


def hook_optimizers(activity: Activity, ended: Callable[[str, object], None]) -> None:
    """Effect: `ended` is called after each step of an optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_compiling = torch.compiler.is_compiling

    def prepared(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if activity.record is None or is_compiling():
            return None
        named = {name: _closure(activity, value) for name, value in kwargs.items()}
        return (*args[:1], *(_closure(activity, each) for each in args[1:])), named

    register_optimizer_step_pre_hook(prepared)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():  # A step inside the program's own compiled function belongs to its graph.
            ended("optimizer", id(optimizer))

    register_optimizer_step_post_hook(stepped)


def _closure(activity: Activity, value: Any) -> Any:
    """The value; of a closure one that makes a region while it runs: what it computes is no part of the optimizer."""
    if not isinstance(value, FunctionType | MethodType):  # Others have attributes that the optimizer may use.
        return value

    @wraps(value)
    def closure(*args: Any, **kwargs: Any) -> Any:
        if activity.record is None:
            return value(*args, **kwargs)
        with activity.record("cpulaunch::closure"):
            return value(*args, **kwargs)

    return closure


def hook_backward(activity: Activity, ended: Callable[[str, object], None]) -> None:
    """Effect: backward passes are timed, those that return their gradients too."""
    is_compiling = torch.compiler.is_compiling

    def hooked(plain: Any) -> Any:
        @wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return plain(*args, **kwargs)
            try:
                return activity.timed("backward", plain, args, kwargs)
            finally:
                ended("backward", "")

        return backward

    torch.autograd.backward, torch.autograd.grad = hooked(torch.autograd.backward), hooked(torch.autograd.grad)
    with suppress(ImportError, AttributeError):  # torch.jit.script knows what is built in by the function's identity.
        register = import_module("torch.jit._builtins")._register_builtin
        register(torch.autograd.backward, "aten::backward")
        register(torch.autograd.grad, "aten::grad")


def hook_loaders(activity: Activity, ended: Callable[[str, object], None], fetched: Any) -> None:
    """Effect: DataLoaders are timed: how long a program waits, and in any process how long samples take.

    An epoch that starts worker processes waits for them, too. `fetched` is called with the wall and the CPU seconds of
    a fetch, of those the seconds of collating, and the items.
    """
    from torch.utils.data import dataloader
    from torch.utils.data._utils import fetch

    iterator: Any = dataloader._BaseDataLoaderIter
    loader: Any = dataloader.DataLoader
    plain_next, plain_iter = iterator.__next__, loader.__iter__

    @wraps(plain_next)
    def __next__(self: Any) -> Any:  # noqa: N807
        batch = None
        try:
            batch = activity.timed("data", plain_next, (self,), {})
            return batch
        finally:
            if activity.loader != id(self) or activity.batch_bytes == 0:
                _note_loader(activity, self, batch)
            ended("loader", "")

    @wraps(plain_iter)
    def __iter__(self: Any) -> Any:  # noqa: N807
        return activity.timed("data", plain_iter, (self,), {})

    iterator.__next__, loader.__iter__ = __next__, __iter__
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        _time_fetcher(getattr(fetch, name), fetched)


def _note_loader(activity: Activity, iterator: Any, batch: object) -> None:
    """Effect: the activity knows the last DataLoader, as far as its batch tells its size."""
    activity.loader = id(iterator)
    activity.loader_workers = getattr(iterator, "_num_workers", 0)
    activity.prefetched = getattr(iterator, "_prefetch_factor", None) or 0
    with suppress(Exception):  # A batch may be of any class.
        activity.batch_bytes = tensor_bytes(batch)


def tensor_bytes(value: object, *, depth: int = 0) -> int:
    """Bytes of the tensors in a batch: a tensor, or lists, tuples and dictionaries of such."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if depth > MOST_DEPTH:
        return 0
    if isinstance(value, dict):
        return sum(tensor_bytes(each, depth=depth + 1) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(each, depth=depth + 1) for each in value)
    return 0


def _time_fetcher(fetcher: Any, fetched: Any) -> None:
    plain_init, plain_fetch = fetcher.__init__, fetcher.fetch

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        collate = self.collate_fn
        self.cpulaunch_collate_seconds = 0.0

        def timed_collate(data: Any) -> Any:
            start = perf_counter()
            try:
                return collate(data)
            finally:
                self.cpulaunch_collate_seconds += perf_counter() - start

        self.collate_fn = timed_collate

    @wraps(plain_fetch)
    def timed_fetch(self: Any, possibly_batched_index: Any) -> Any:
        cpu, start, before = thread_time(), perf_counter(), getattr(self, "cpulaunch_collate_seconds", 0.0)
        try:
            return plain_fetch(self, possibly_batched_index)
        finally:
            seconds, used = perf_counter() - start, thread_time() - cpu
            fetched(seconds, used, getattr(self, "cpulaunch_collate_seconds", 0.0) - before)

    fetcher.__init__, fetcher.fetch = init, timed_fetch


def hook_collectives(activity: Activity) -> None:
    """Effect: calls of collectives are timed, and waiting for those that were started asynchronously."""
    if not torch.distributed.is_available():
        return
    module = import_module("torch.distributed.distributed_c10d")
    for name in COLLECTIVES:
        plain = getattr(module, name, None)
        if plain is None:
            continue
        timed = _timed(activity, plain)
        for place in (module, torch.distributed):
            if getattr(place, name, None) is plain:
                setattr(place, name, timed)
    work = getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
    if work is not None:
        work.wait = _timed(activity, work.wait)


def _timed(activity: Activity, plain: Any) -> Any:
    is_compiling = torch.compiler.is_compiling

    @wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # Dynamo knows the plain function and rewrites it.
            return plain(*args, **kwargs)
        return activity.timed("collective", plain, args, kwargs)

    return timed


PROFILERS = {
    "profile": ("_prepare_trace", "_start_trace"),
    "emit_itt": ("__enter__",),
    "emit_nvtx": ("__enter__",),
}
"""Classes of torch.autograd.profiler, and the methods that need the profiler for themselves."""


def hook_profilers(before: Callable[[], None]) -> None:
    """Effect: `before` is called when a profiler of torch's is about to prepare or start.

    Only one can run in a process: another one raises in the program.
    """
    from torch.autograd import profiler

    for kind, names in PROFILERS.items():
        owner = getattr(profiler, kind, None)
        for name in names:
            plain = getattr(owner, name, None)
            if plain is not None:
                setattr(owner, name, _announced(plain, before))


def _announced(plain: Any, before: Callable[[], None]) -> Any:
    @wraps(plain)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "enabled", True):
            before()
        return plain(self, *args, **kwargs)

    return announced
