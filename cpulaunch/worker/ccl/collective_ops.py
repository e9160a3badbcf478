"""Collectives on torch's tensors: they flatten the tensors, pack the call that ranks compare, and run a path."""

from __future__ import annotations

import torch

from cpulaunch.worker.ccl.wire.reductions import Reduction, packed_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from torch import Tensor

    from cpulaunch.worker.ccl.memory.path import MemoryPath
    from cpulaunch.worker.ccl.oneccl.path import OnecclPath

    Method = TypeVar("Method", bound=Callable[..., Any])


def without_autograd(function: Method) -> Method:
    """The function without autograd, which would record it, or refuse to change a parameter in place."""
    hidden: Method = torch.inference_mode()(function)
    return hidden


def dense(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor without autograd; a copy if the tensor is not contiguous or negates on reading."""
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)


def restore(tensor: Tensor, flat: Tensor) -> None:
    """Effect: copies the elements back to the tensor, if `dense` had to copy them."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(flat.view(tensor.shape))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def apart(source: Tensor, target: Tensor, row: int) -> Tensor:
    """The flat source; a copy if it shares memory with the target and the smaller is not row number `row` of the other.

    Large tensors pass in pieces: the source is still read after parts of the target have been written.
    """
    distance, smaller = abs(source.data_ptr() - target.data_ptr()), min(source.nbytes, target.nbytes)
    return source.clone() if overlap(source, target) and distance != row * smaller else source


class CollectiveOps:
    """One rank's collectives. Every method blocks, and all ranks call the methods in the same order.

    Raises, from every method: RanksDisagreeError if the calls do not match; PeerLostError if a rank is lost; CclError.
    """

    def __init__(self, path: MemoryPath | OnecclPath, *, rank: int, size: int) -> None:
        self.path, self._rank, self._size = path, rank, size

    def barrier(self) -> None:
        """Effect: returns when all ranks have called it."""
        self.path.barrier(packed_call("barrier", torch.int32, 1))

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        call = packed_call("all_reduce", tensor.dtype, tensor.numel(), reduced=reduction.number)
        if tensor.is_contiguous() and not tensor.is_neg():
            self.path.all_reduce(call, tensor, reduction)
        else:
            self._all_reduce_copied(call, tensor, reduction)

    @without_autograd
    def _all_reduce_copied(self, call: bytes, tensor: Tensor, reduction: Reduction) -> None:
        flat = dense(tensor)
        self.path.all_reduce(call, flat, reduction)
        restore(tensor, flat)

    @without_autograd
    def reduce(self, tensor: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's tensor is reduced over all ranks; the others' stay as they are."""
        flat = dense(tensor)
        call = packed_call("reduce", flat.dtype, flat.numel(), root=root, reduced=reduction.number)
        self.path.reduce(call, flat, reduction, root=root)
        restore(tensor, flat)

    @without_autograd
    def reduce_scatter(self, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        flat = dense(target)
        call = packed_call("reduce_scatter", flat.dtype, flat.numel(), reduced=reduction.number)
        self.path.reduce_scatter(call, flat, apart(dense(source), flat, self._rank), reduction)
        restore(target, flat)

    @without_autograd
    def reduce_scatter_list(self, target: Tensor, sources: Sequence[Tensor], reduction: Reduction) -> None:
        """Effect: the target is this rank's source, reduced over all ranks; sources may differ in size."""
        if all(source.numel() == target.numel() for source in sources):
            self.reduce_scatter(target, _concatenated(sources), reduction)
            return
        for root, source in enumerate(sources):
            copied = source.data.clone()
            self.reduce(copied, reduction, root=root)
            if root == self._rank:
                result = copied
        target.data.copy_(result.view(target.shape))

    @without_autograd
    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """Effect: the tensor is the root's."""
        flat = dense(tensor)
        self.path.broadcast(packed_call("broadcast", flat.dtype, flat.numel(), root=root), flat, root=root)
        restore(tensor, flat)

    @without_autograd
    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """Effect: the target is all ranks' sources, in their order."""
        flat, row = dense(target), dense(source)
        self.path.all_gather(packed_call("all_gather", row.dtype, row.numel()), flat, apart(row, flat, self._rank))
        restore(target, flat)

    @without_autograd
    def all_gather_list(self, targets: Sequence[Tensor], source: Tensor) -> None:
        """Effect: each target is its rank's source; they may differ in size, as all ranks know."""
        if all(target.numel() == source.numel() for target in targets):
            gathered = _empty_rows(source, len(targets))
            self.all_gather(gathered, source)
            _copy_rows(gathered, targets)
            return
        targets[self._rank].data.copy_(source.data.reshape(targets[self._rank].shape))
        for root, target in enumerate(targets):
            self.broadcast(target, root=root)

    @without_autograd
    def gather(self, targets: Sequence[Tensor] | None, source: Tensor, *, root: int) -> None:
        """Effect: the root's targets are the ranks' sources."""
        row = dense(source)
        gathered = None if targets is None else _empty_rows(source, self._size)
        call = packed_call("gather", row.dtype, row.numel(), root=root)
        self.path.gather(call, None if gathered is None else gathered.view(-1), row)
        if targets is not None and gathered is not None:
            _copy_rows(gathered, targets)

    @without_autograd
    def scatter(self, target: Tensor, sources: Sequence[Tensor] | None, *, root: int) -> None:
        """Effect: the target is what the root has for this rank."""
        flat = dense(target)
        call = packed_call("scatter", flat.dtype, flat.numel(), root=root)
        self.path.scatter(call, flat, None if sources is None else _concatenated(sources), root=root)
        restore(target, flat)

    @without_autograd
    def all_to_all(self, target: Tensor, source: Tensor, splits: Sequence[Sequence[int]]) -> None:
        """Effect: the target is what all ranks have for this one. `splits`: elements for each rank, and from each."""
        flat, row = dense(target), dense(source)
        row = row.clone() if overlap(row, flat) else row
        self.path.all_to_all(packed_call("all_to_all", row.dtype, 0), flat, row, splits)
        restore(target, flat)

    @without_autograd
    def all_to_all_list(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Effect: each target is what its rank has for this one; sizes may differ."""
        splits = [[each.numel() for each in tensors] for tensors in (sources, targets)]
        row = _concatenated(sources)
        flat = row.new_empty(sum(splits[1]))
        self.all_to_all(flat, row, splits)
        for target, part in zip(targets, flat.split(splits[1]), strict=True):
            target.data.copy_(part.view(target.shape))


def _empty_rows(source: Tensor, size: int) -> Tensor:
    """An uninitialised tensor with one row of as many elements for each rank."""
    return source.data.new_empty((size, source.numel()))


def _copy_rows(rows: Tensor, targets: Sequence[Tensor]) -> None:
    """Effect: copies each row to its target."""
    for target, row in zip(targets, rows, strict=True):
        target.data.copy_(row.view(target.shape))


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """All elements as one flat tensor."""
    return torch.cat([tensor.data.reshape(-1) for tensor in tensors])
