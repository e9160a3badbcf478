"""Detection of what changes tensors, or allows it, without autograd's version counter.

These are accesses to `.data`, `.numpy()` and DLPack, and collectives of torch.distributed that receive into a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.versions import count_fused_writes


class Watcher(Protocol):
    """What depends on the values of tensors; `changed` is set once one of them may have changed."""

    changed: bool


_watchers: dict[int, weakref.WeakSet[Any]] = {}
"""Address of a watched tensor's storage -> the watchers of tensors in it."""


_arrays: dict[int, list[weakref.ref[Any]]] = {}
"""Address of a storage that was watched -> the NumPy arrays made of its memory. An array's views keep it alive."""

MIN_PRUNED = 64
_size_to_prune = [MIN_PRUNED]
"""Storages are forgotten whose watchers no longer exist, once there are twice as many as the last time."""


def watch_access(watcher: Watcher, tensors: list[Tensor]) -> None:
    """Effect: from now on an access to `.data` or `.numpy()` of these tensors sets `watcher.changed`."""
    _install_once()
    for storage in set(map(storage_of, tensors)):
        _watchers.setdefault(storage, weakref.WeakSet()).add(watcher)
    if len(_watchers) > _size_to_prune[0]:
        for storage in [storage for storage, watchers in tuple(_watchers.items()) if not watchers]:
            _watchers.pop(storage, None)
        _size_to_prune[0] = 2 * max(MIN_PRUNED, len(_watchers))


def _record_access(tensor: Tensor) -> bool:
    """Whether the tensor is watched. Effect: its watchers are told."""
    if not _watchers or type(tensor) not in (Tensor, nn.Parameter):
        return False
    watchers: Any = _watchers.get(storage_of(tensor))
    for reference in () if watchers is None else tuple(watchers.data):  # In one step: other threads may add some.
        watcher = reference()
        if watcher is not None:
            watcher.changed = True
    return watchers is not None


def _record_array(tensor: Tensor, array: Any) -> None:
    if _watchers and type(tensor) in (Tensor, nn.Parameter) and (storage := storage_of(tensor)) in _watchers:
        _arrays[storage] = [*_living_arrays(storage), weakref.ref(array)]


def _living_arrays(storage: int) -> list[weakref.ref[Any]]:
    living = [reference for reference in _arrays.get(storage, ()) if reference() is not None]
    if not living:
        _arrays.pop(storage, None)
    return living


def is_in_array(tensor: Tensor) -> bool:
    """Whether the program holds a NumPy array, made since the tensor was watched, in the tensor's memory."""
    return bool(_arrays) and bool(_living_arrays(storage_of(tensor)))


RECEIVING = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "recv", "recv_anysource", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("all_gather_single_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of process groups that write to tensors. Seen with torch 2.13 and gloo: their versions stay as they are."""

_receiving: list[tuple[Any, int]] = []
"""The works of collectives that had not ended when they were last looked at, each with a storage that was watched."""


def is_receiving(tensor: Tensor) -> bool:
    """Whether a collective may still write to the tensor's memory, which was watched when that began."""
    for each in tuple(_receiving):  # Other threads may add some.
        if each[0].is_completed():
            with suppress(ValueError):
                _receiving.remove(each)
    return bool(_receiving) and storage_of(tensor) in {storage for _, storage in tuple(_receiving)}


def _watch_groups() -> None:
    """Effect: collectives set `changed` for the tensors that they are given, and count as holders until they end."""
    if not torch.distributed.is_available():
        return
    kind: Any = torch.distributed.ProcessGroup
    for each in (kind, *kind.__subclasses__()):
        _watch_methods(each)
    kind.__init_subclass__ = classmethod(lambda later, **named: _watch_methods(later))


def _watch_methods(kind: Any) -> None:
    for name in RECEIVING:
        if name in vars(kind):
            setattr(kind, name, _watched_method(vars(kind)[name]))


def _watched_method(plain: Any) -> Any:
    @wraps(plain)
    def method(group: Any, *given: Any, **named: Any) -> Any:
        watched: list[Tensor] = []
        try:
            work = plain(group, *given, **named)
        finally:
            watched += filter(_record_access, _tensors((*given, *named.values())) if _watchers else ())
        if watched and work is not None and not work.is_completed():
            _receiving.extend((work, storage_of(tensor)) for tensor in watched)
        return work

    return method


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


_installed: list[bool] = []


def _install_once() -> None:
    """Effect: wraps torch.Tensor's `data`, `numpy` and `__dlpack__`, so that accesses to watched tensors are detected.

    So are collectives.

    Source: torch/csrc/autograd/python_variable.cpp: `data` does not share the version counter.
    """
    if _installed:
        return
    _installed.append(True)
    count_fused_writes()
    _watch_groups()
    plain_data: Any = torch._C.TensorBase.data
    plain_numpy: Any = torch.Tensor.numpy

    def data(self: Tensor) -> Tensor:
        _record_access(self)
        return plain_data.__get__(self)

    def set_data(self: Tensor, value: Tensor) -> None:
        _record_access(self)
        plain_data.__set__(self, value)

    def numpy(self: Tensor, *, force: bool = False) -> Any:
        _record_access(self)
        array = plain_numpy(self, force=force)
        _record_array(self, array)
        return array

    plain_dlpack: Any = torch.Tensor.__dlpack__

    @wraps(plain_dlpack)
    def dlpack(self: Tensor, *given: Any, **options: Any) -> Any:
        _record_access(self)
        return plain_dlpack(self, *given, **options)

    plain_capsule: Any = torch.utils.dlpack.to_dlpack

    @wraps(plain_capsule)
    def to_dlpack(tensor: Tensor, *given: Any, **options: Any) -> Any:
        _record_access(tensor)
        return plain_capsule(tensor, *given, **options)

    torch.Tensor.__dlpack__ = dlpack
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack
    numpy.__doc__ = plain_numpy.__doc__
    numpy.__module__, numpy.__qualname__ = "torch", "Tensor.numpy"  # By which the program pickles it.
    to_dlpack.__module__, to_dlpack.__qualname__ = "torch.utils.dlpack", "to_dlpack"
    torch.Tensor.data = property(data, set_data)
    torch.Tensor.numpy = numpy
