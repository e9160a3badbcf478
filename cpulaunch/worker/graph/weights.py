"""The tensors a capture has frozen, and whether they still are what they were."""

from __future__ import annotations

import weakref
from operator import attrgetter, getitem, is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.versions import count_fused_writes

_version = attrgetter("_version")


class Weights:
    """Parameters, buffers and other tensor attributes of a module and all below it, as they are now.

    Noticed are: a method of a class replaced, a tensor or submodule replaced, added to or removed from a module, a
    tensor changed in place (autograd's version counter), its storage exchanged (`.to`, `.data = …`), and any access to
    `.data` or `.numpy()`, which may change elements behind the version counter's back. Not noticed: writes through
    aliases made earlier by `.numpy()`, and through pointers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[object] = []
        self._tables: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        for part in module.modules():
            self._note(part)
        for kind in {kind for part in module.modules() for kind in type(part).__mro__} - {nn.Module, object}:
            self._note_class(kind)
        self._sizes = list(map(len, self._tables))
        self._versions = list(map(_version, self.tensors))
        self._pointers = list(map(Tensor.data_ptr, self.tensors))
        self.touched = False
        _watch(self)

    def _note(self, part: nn.Module) -> None:
        own = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        for table, entries in (
            *((table, table) for table in (part._parameters, part._buffers, part._modules)),
            (vars(part), own),
        ):
            if table is entries:
                self._tables.append(table)
            for name, value in entries.items():
                self._dicts.append(table)
                self._names.append(name)
                self._values.append(value)
                if isinstance(value, Tensor):
                    self.tensors.append(value)

    def _note_class(self, kind: type) -> None:
        """Effect: methods replaced in the class are noticed: Dynamo's guards do not look there."""
        table: Any = vars(kind)
        self._tables.append(table)
        for name, value in table.items():
            if name == "forward" or (isinstance(value, FunctionType) and not kind.__module__.startswith("torch.")):
                self._dicts.append(table)
                self._names.append(name)
                self._values.append(value)

    def unchanged(self) -> bool:
        """Whether everything is as it was; after a change it stays False."""
        if self.touched:
            return False
        try:
            same = (
                all(map(is_, map(getitem, self._dicts, self._names), self._values))
                and list(map(len, self._tables)) == self._sizes
                and list(map(_version, self.tensors)) == self._versions
                and list(map(Tensor.data_ptr, self.tensors)) == self._pointers
            )
        except KeyError:
            same = False
        self.touched = not same
        return same


# Access to .data and .numpy()

_watched: dict[int, weakref.WeakSet[Weights]] = {}
"""Address of the memory a frozen tensor is in -> who froze it."""


def _watch(weights: Weights) -> None:
    """Effect: access to the tensors' memory is noticed from here on."""
    _install_once()
    for storage in set(map(storage_of, weights.tensors)):
        _watched.setdefault(storage, weakref.WeakSet()).add(weights)


def _note_access(tensor: Tensor) -> None:
    if _watched and type(tensor) in (Tensor, nn.Parameter):
        for weights in tuple(_watched.get(storage_of(tensor), ())):
            weights.touched = True


_installed: list[bool] = []


def _install_once() -> None:
    """Effect: torch.Tensor's `data` and `numpy` report every access to a frozen tensor.

    Source: torch/csrc/autograd/python_variable.cpp: `data` is a variable without the version counter.
    """
    if _installed:
        return
    _installed.append(True)
    count_fused_writes()
    plain_data: Any = torch._C.TensorBase.data
    plain_numpy: Any = torch.Tensor.numpy

    def data(self: Tensor) -> Tensor:
        _note_access(self)
        return plain_data.__get__(self)

    def set_data(self: Tensor, value: Tensor) -> None:
        _note_access(self)
        plain_data.__set__(self, value)

    def numpy(self: Tensor, *, force: bool = False) -> Any:
        _note_access(self)
        return plain_numpy(self, force=force)

    numpy.__doc__ = plain_numpy.__doc__
    torch.Tensor.data = property(data, set_data)
    torch.Tensor.numpy = numpy
