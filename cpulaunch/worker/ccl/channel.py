"""What the process's thread does: every collective made of oneCCL's six, on flat tensors, after all ranks have met."""

from __future__ import annotations

import torch

from cpulaunch.worker.ccl import api
from cpulaunch.worker.ccl.numbers import Reduction, packed_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.api import Communicator
    from cpulaunch.worker.ccl.meeting import Meeting

_WIDE_BYTES = 8


def dense(tensor: Tensor) -> Tensor:
    """The elements in one row; a copy if they are not."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _moved(tensor: Tensor, parts: int = 1) -> tuple[int, int]:
    """How many elements of which of oneCCL's types hold a part's bytes: what is only moved may be of any type."""
    size = tensor.numel() * tensor.element_size() // parts
    return (size // _WIDE_BYTES, api.UINT64) if size % _WIDE_BYTES == 0 else (size, api.UINT8)


class Channel:
    """One rank's way to the others of its group. Every method blocks, and is called by all ranks in the same order."""

    def __init__(self, communicator: Communicator, meeting: Meeting | None, *, size: int, seconds: float) -> None:
        self._communicator, self._meeting = communicator, meeting
        self._size, self._seconds = size, seconds

    def meet(self, name: str, tensor: Tensor, *, root: int = -1, reduced: int = 0) -> bool:
        """Whether there is anything to move. Effect: all ranks are here, about to do the same. Raises: CclError."""
        count = tensor.numel()
        if self._meeting is not None:
            self._meeting.meet(packed_call(name, tensor.dtype, count, root=root, reduced=reduced), self._seconds)
        return count > 0

    def barrier(self) -> None:
        """Effect: returns when all ranks are here."""
        token = torch.zeros(1, dtype=torch.int32)
        self.meet("barrier", token)
        if self._meeting is None:
            self._communicator.all_reduce(token.data_ptr(), 1, api.INT32, api.SUM)

    def all_reduce(self, tensor: Tensor, how: Reduction) -> None:
        """Effect: the tensor is reduced over all ranks."""
        if not self.meet("all_reduce", tensor, reduced=how.number):
            return
        flat = dense(tensor)
        self._communicator.all_reduce(flat.data_ptr(), flat.numel(), how.kind, how.operation)
        self._finish(flat, tensor, how)

    def _finish(self, flat: Tensor, tensor: Tensor, how: Reduction) -> None:
        if how.averages:
            flat.div_(self._size, rounding_mode=None if flat.is_floating_point() else "trunc")
        if flat is not tensor:
            tensor.copy_(flat)

    def reduce(self, tensor: Tensor, how: Reduction, *, root: int, is_root: bool) -> None:
        """Effect: the root's tensor is reduced over all ranks; the others' stay as they are."""
        if not self.meet("reduce", tensor, root=root, reduced=how.number):
            return
        flat = dense(tensor)
        if not is_root and flat is tensor:
            flat = tensor.clone()
        self._communicator.reduce(flat.data_ptr(), flat.numel(), how.kind, operation=how.operation, root=root)
        if is_root:
            self._finish(flat, tensor, how)

    def reduce_scatter(self, target: Tensor, source: Tensor, how: Reduction) -> None:
        """Effect: the target is this rank's part of the source, reduced over all ranks."""
        if not self.meet("reduce_scatter", target, reduced=how.number):
            return
        flat, row = dense(target), dense(source)
        self._communicator.reduce_scatter(
            row.data_ptr(), flat.data_ptr(), count=flat.numel(), kind=how.kind, operation=how.operation
        )
        self._finish(flat, target, how)

    def reduce_scatter_list(self, target: Tensor, sources: Sequence[Tensor], how: Reduction, *, rank: int) -> None:
        """Effect: the target is this rank's source, reduced over all ranks; sources may differ in size."""
        if all(source.numel() == target.numel() for source in sources):
            self.reduce_scatter(target, _joined(sources), how)
            return
        for root, source in enumerate(sources):
            flat = target if root == rank else source
            if root == rank:
                target.copy_(source.reshape(target.shape))
            self.reduce(flat, how, root=root, is_root=root == rank)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """Effect: the tensor is the root's."""
        if not self.meet("broadcast", tensor, root=root):
            return
        flat = dense(tensor)
        self._communicator.broadcast(flat.data_ptr(), *_moved(flat), root=root)
        if flat is not tensor:
            tensor.copy_(flat)

    def all_gather(self, target: Tensor, source: Tensor, *, name: str = "all_gather", root: int = -1) -> None:
        """Effect: the target is all ranks' sources, in their order."""
        if not self.meet(name, source, root=root):
            return
        flat, row = dense(target), dense(source)
        self._communicator.all_gather(row.data_ptr(), flat.data_ptr(), *_moved(row))
        if flat is not target:
            target.copy_(flat)

    def all_gather_list(self, targets: Sequence[Tensor], source: Tensor, *, rank: int) -> None:
        """Effect: each target is its rank's source; they may differ in size, as all ranks know."""
        if all(target.numel() == source.numel() for target in targets):
            gathered = source.new_empty((len(targets), source.numel()))
            self.all_gather(gathered, source)
            for target, part in zip(targets, gathered, strict=True):
                target.copy_(part.view(target.shape))
            return
        targets[rank].copy_(source.reshape(targets[rank].shape))
        for root, target in enumerate(targets):
            self.broadcast(target, root=root)

    def gather(self, targets: Sequence[Tensor] | None, source: Tensor, *, root: int) -> None:
        """Effect: the root's targets are the ranks' sources."""
        gathered = source.new_empty((self._size, source.numel()))
        self.all_gather(gathered, source, name="gather", root=root)
        if targets is not None:
            for target, part in zip(targets, gathered, strict=True):
                target.copy_(part.view(target.shape))

    def scatter(self, target: Tensor, sources: Sequence[Tensor] | None, *, root: int, rank: int) -> None:
        """Effect: the target is what the root has for this rank."""
        whole = target.new_empty((self._size, target.numel())) if sources is None else _joined(sources)
        self.broadcast(whole, root=root)
        target.copy_(whole.view(self._size, -1)[rank].view(target.shape))

    def all_to_all(self, target: Tensor, source: Tensor) -> None:
        """Effect: the target is what all ranks have for this one, all of the same size."""
        if not self.meet("all_to_all", source):
            return
        flat, row = dense(target), dense(source)
        self._communicator.all_to_all(row.data_ptr(), flat.data_ptr(), *_moved(row, self._size))
        if flat is not target:
            target.copy_(flat)

    def all_to_all_list(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Effect: each target is what its rank has for this one; sizes may differ. All move as much as the largest."""
        sizes = torch.tensor([source.numel() for source in sources], dtype=torch.int64)
        table = torch.empty((self._size, self._size), dtype=torch.int64)
        self.all_gather(table, sizes)
        most = int(table.max())
        sent, received = (sources[0].new_empty((self._size, most)) for _ in range(2))
        for row, source in zip(sent, sources, strict=True):
            row[: source.numel()] = source.reshape(-1)
        self.all_to_all(received.view(-1), sent.view(-1))
        for row, target in zip(received, targets, strict=True):
            target.copy_(row[: target.numel()].view(target.shape))

    def lost_peer(self) -> tuple[int, int] | None:
        """A rank of this host whose process has ended, with its id; None if none has, as far as can be known."""
        return None if self._meeting is None else self._meeting.lost()

    def close(self) -> None:
        """Effect: this rank has left. Raises: CclError."""
        if self._meeting is not None:
            self._meeting.close()
        self._communicator.close()


def _joined(tensors: Sequence[Tensor]) -> Any:
    """All elements in one row."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
