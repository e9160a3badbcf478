"""Collectives on torch's tensors, of both paths: they flatten the tensors and pack the call that ranks compare."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cpulaunch.worker.ccl.wire.reductions import Reduction, packed_call

Tensors = list[Tensor]
Method = TypeVar("Method", bound=Callable[..., Any])


def without_autograd(function: Method) -> Method:
    """The function without autograd, which would record it, or refuse to change a parameter in place."""
    return torch.inference_mode()(function)


def dense(tensors: Tensor | Tensors) -> Tensor:
    """All elements as a flat tensor without autograd; a copy unless it is one contiguous tensor that is no view."""
    if isinstance(tensors, list):
        return torch.cat([tensor.data.reshape(-1) for tensor in tensors])
    return tensors.data.resolve_conj().resolve_neg().contiguous().view(-1)


def restore(tensors: Tensor | Tensors, flat: Tensor) -> None:
    """Effect: copies the elements back to the tensors, if they are not the same memory."""
    if isinstance(tensors, list):
        for tensor, part in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
            tensor.data.copy_(part.view(tensor.shape))
    elif flat.data_ptr() != tensors.data_ptr():
        tensors.data.copy_(flat.view(tensors.shape))


def apart(source: Tensor, target: Tensor, row: int | None) -> Tensor:
    """The flat source; a copy if it shares memory with the target and the smaller is not row number `row` of the other.

    Large tensors pass in pieces: the source is still read after parts of the target have been written.
    """
    first, second, smaller = source.data_ptr(), target.data_ptr(), min(source.nbytes, target.nbytes)
    overlaps = first < second + target.nbytes and second < first + source.nbytes
    return source.clone() if overlaps and (row is None or abs(first - second) != row * smaller) else source


class CollectivePath(ABC):
    """One rank's collectives. Every method blocks, and all ranks call the methods in the same order.

    Raises, from every method: RanksDisagreeError if the calls do not match; PeerLostError if a rank is lost; CclError.
    """

    rank: int

    @abstractmethod
    def run_call(
        self,
        call: bytes,
        target: Tensor | None = None,
        source: Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        splits: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Effect: as run, of a packed call, which the ranks compare. The tensors are contiguous and flat."""

    def barrier(self) -> None:
        """Effect: returns when all ranks have called it."""
        self.run_call(packed_call("barrier", torch.int32, 1))

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        self.run("all_reduce", tensor, tensor, reduction=reduction)

    @without_autograd
    def run(
        self,
        name: str,
        target: Tensor | Tensors | None,
        source: Tensor | Tensors | None,
        *,
        root: int | None = None,
        **how: Any,
    ) -> None:
        """Effect: the target of this rank, if it has one, holds what the collective makes of the ranks' sources.

        A list stands for its elements one after another. `how`: the reduction, or an all-to-all's numbers of elements
        for each rank, and from each (`splits`).
        """
        row = None if source is None else dense(source)
        if target is source:
            flat = row
        elif isinstance(target, list):
            flat = target[0].data.new_empty(sum(each.numel() for each in target))
        else:
            flat = None if target is None else dense(target)
        if flat is not None and row is not None and (flat is not row or "splits" in how):
            row = apart(row, flat, None if "splits" in how else self.rank)
        block: Any = row if flat is None or (row is not None and row.numel() <= flat.numel()) else flat
        reduced = how["reduction"].number if "reduction" in how else 0
        count = 0 if "splits" in how else block.numel()
        self.run_call(packed_call(name, block.dtype, count, root=root, reduced=reduced), flat, row, **how)
        if target is not None and flat is not None:
            restore(target, flat)

    def reduce(self, tensor: Tensor, reduction: Reduction, *, root: int) -> None:
        """Effect: the root's tensor is reduced over all ranks; the others' stay as they are."""
        self.run("reduce", tensor if root == self.rank else None, tensor, root=root, reduction=reduction)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """Effect: the tensor is the root's."""
        target, source = (None, tensor) if root == self.rank else (tensor, None)
        self.run("broadcast", target, source, root=root)

    @without_autograd
    def reduce_scatter_list(self, target: Tensor, sources: Tensors, reduction: Reduction) -> None:
        """Effect: the target is this rank's source, reduced over all ranks; sources may differ in size."""
        if all(source.numel() == target.numel() for source in sources):
            self.run("reduce_scatter", target, sources, reduction=reduction)
            return
        for root, source in enumerate(sources):
            copied = source.data.clone()
            self.reduce(copied, reduction, root=root)
            if root == self.rank:
                result = copied
        target.data.copy_(result.view(target.shape))

    @without_autograd
    def all_gather_list(self, targets: Tensors, source: Tensor) -> None:
        """Effect: each target is its rank's source; they may differ in size, as all ranks know."""
        if all(target.numel() == source.numel() for target in targets):
            self.run("all_gather", targets, source)
            return
        targets[self.rank].data.copy_(source.data.reshape(targets[self.rank].shape))
        for root, target in enumerate(targets):
            self.broadcast(target, root=root)
