"""The tensors that a capture has frozen, and whether they have changed since."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter, getitem, is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.access import watch_access
from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.owners import counts_owners, is_held_elsewhere, is_in_use

_version = attrgetter("_version")


@record
class Contained:
    """A tensor in a dict, list or tuple that is the attribute `name` of a module, as tables of attention biases are."""

    attributes: dict[str, Any]
    name: str
    container: Any
    key: Any
    tensor: Tensor


MAX_CONTAINED = 1024
"""Longer containers are not searched for tensors."""


_TABLES = ("_parameters", "_buffers", "_modules")


def contained(module: nn.Module, known: list[Tensor]) -> list[Contained]:
    """What a capture may take for constant once it is watched: tensors whose memory nothing else holds.

    So are the `known` ones, which are attributes of modules too: the container may get others in their places.
    """
    names = set(map(id, known))
    found = []
    for part in module.modules():
        for name, value in tuple(vars(part).items()):
            if name in _TABLES or type(value) not in (dict, list, tuple) or not 0 < len(value) <= MAX_CONTAINED:
                continue
            for key, tensor in tuple(value.items() if type(value) is dict else enumerate(value)):
                if isinstance(tensor, Tensor) and (id(tensor) in names or _is_watchable(tensor)):
                    found.append(Contained(attributes=vars(part), name=name, container=value, key=key, tensor=tensor))
    return found


def _is_watchable(tensor: Tensor) -> bool:
    """Whether it is seen when the program changes the tensor. Inference tensors have no version counter."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_inference()
    return is_plain and counts_owners() and not is_in_use(tensor)


class Weights:
    """Parameters, buffers and other tensor attributes of a module and its submodules, at the time of construction.

    Detected changes: a method of a class is replaced; a tensor or submodule is replaced, added to or removed from a
    module; a tensor is changed in place (autograd's version counter) or gets another storage (`.to`, `.data = …`);
    `.data` or `.numpy()` is accessed, which allows changes without the version counter; a collective receives into it.
    Not detected: writes through pointers, and through what was made by `.data` or `.numpy()` before construction; see
    `are_held_elsewhere`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[Any] = []
        self._names: list[Any] = []
        self._values: list[object] = []
        self._tables: list[Any] = []
        self._watched: set[tuple[int, str, Any]] = set()
        self.tensors: list[Tensor] = []
        for part in module.modules():
            self._record(part)
        for kind in {kind for part in module.modules() for kind in type(part).__mro__} - {nn.Module, object}:
            self._record_class(kind)
        self._sizes = list(map(len, self._tables))
        self._versions = list(map(_version, self.tensors))
        self._pointers = list(map(Tensor.data_ptr, self.tensors))
        self.changed = False
        watch_access(self, self.tensors)

    def _record(self, part: nn.Module) -> None:
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

    def _record_class(self, kind: type) -> None:
        """Effect: records the methods of the class, because Dynamo's guards do not check them."""
        table: Any = vars(kind)
        self._tables.append(table)
        for name, value in table.items():
            if name == "forward" or (isinstance(value, FunctionType) and not kind.__module__.startswith("torch.")):
                self._dicts.append(table)
                self._names.append(name)
                self._values.append(value)

    def watch(self, entries: list[Contained]) -> None:
        """Effect: these count as weights from now on, and a change of their containers as one of the module."""
        for entry in entries:
            if (id(entry.attributes), entry.name, entry.key) in self._watched:
                continue
            self._watched.add((id(entry.attributes), entry.name, entry.key))
            places = [(entry.attributes, entry.name, entry.container), (entry.container, entry.key, entry.tensor)]
            for table, name, value in places:
                self._dicts.append(table)
                self._names.append(name)
                self._values.append(value)
            self._tables.append(entry.container)
            self._sizes.append(len(entry.container))
            self.tensors.append(entry.tensor)
            self._versions.append(_version(entry.tensor))
            self._pointers.append(entry.tensor.data_ptr())
        watch_access(self, [entry.tensor for entry in entries])

    def are_held_elsewhere(self) -> bool:
        """Whether the program holds the weights' memory by other tensors or arrays too, as far as this torch can tell.

        They may be what `.data` returned before construction. A view has the version counter of its base.
        """
        if not counts_owners():
            return False
        tensors = {id(tensor): tensor for tensor in self.tensors}.values()
        own = Counter(map(storage_of, tensors))
        return any(
            is_held_elsewhere(tensor, known=own[storage_of(tensor)] - 1)
            for tensor in tensors
            if tensor.is_floating_point() and tensor._base is None
        )

    def unchanged(self) -> bool:
        """Whether nothing has changed since construction; once False, always False."""
        if self.changed:
            return False
        try:
            same = (
                all(map(is_, map(getitem, self._dicts, self._names), self._values))
                and list(map(len, self._tables)) == self._sizes
                and list(map(_version, self.tensors)) == self._versions
                and list(map(Tensor.data_ptr, self.tensors)) == self._pointers
            )
        except (KeyError, IndexError):
            same = False
        self.changed = not same
        return same
