"""The process group "ccl", whose collectives become jobs for the executor of the group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from cpulaunch.worker.ccl import argument_checks, group_setup
from cpulaunch.worker.ccl.executor import Executor, GroupQueue, shared_executor
from cpulaunch.worker.ccl.memory.shared_barrier import open_memory
from cpulaunch.worker.ccl.thread_setup import thread_cpus
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import find_reduction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

    from cpulaunch.worker.ccl.collective_ops import CollectiveOps
    from cpulaunch.worker.ccl.memory.shared_barrier import SharedBarrier
    from cpulaunch.worker.ccl.oneccl.peer_connections import PeerConnections

    Tensors = list[Tensor]


_NO_TIME = timedelta(0)


class CclGroup(ProcessGroup):
    """One rank of a group. Collectives take the memory path or oneCCL; send and recv use gloo.

    Each collective returns a work. The methods check those arguments that torch itself does not check.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Effect: waits for all ranks of the group. Raises: CclError."""
        super().__init__(rank, size)
        self._rank, self._size, self._seconds = rank, size, timeout.total_seconds()
        self._names = {"name": "", "description": "undefined"}
        group_setup.check_machine(sys.platform, os.uname().machine)
        store = group_setup.with_fresh_keys(store, rank)
        memory = open_memory(store, rank=rank, size=size)
        self._ops: CollectiveOps | None = None
        self._setup_peers: SharedBarrier | PeerConnections | None = None
        self._direct: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
        path = group_setup.requested_path()
        barrier = group_setup.open_barrier(memory, rank=rank, size=size, seconds=self._seconds)
        self._is_in_memory = group_setup.agree_on_memory(barrier, path, self._seconds)
        if barrier is not None and self._is_in_memory:
            self._queue = self._queue_on(Executor(thread_cpus(os.environ)))
            self._ops = group_setup.join_memory(barrier, self._seconds)
        else:
            self._queue = self._queue_on(shared_executor())
            join = partial(
                group_setup.join_oneccl,
                store,
                barrier,
                rank=rank,
                size=size,
                seconds=self._seconds,
                on_connect=self._on_connect,
            )
            self._ops = self._queue.submit(join, self._seconds).result()
            self._setup_peers = None

    def _on_connect(self, ranks: SharedBarrier | PeerConnections) -> None:
        """Effect: the ranks are notified if this one fails before the group is set up."""
        self._setup_peers = ranks

    def _queue_on(self, executor: Executor) -> GroupQueue:
        return GroupQueue(executor, lost_peer=self._lost_peer, notify_others=self._notify_others)

    def _submit(self, job: Callable[[], Any], options: Any) -> Work:
        """The work of a job. On the memory path, a synchronous call runs its job in the calling thread.

        A call with a timeout of its own does not, because the ranks wait for each other with the group's timeout.
        """
        timeout = options.timeout
        if timeout > _NO_TIME:
            return self._queue.submit(job, timeout.total_seconds(), has_own_timeout=True)
        if self._is_in_memory and not getattr(options, "asyncOp", True):
            done = self._queue.do_now(job)
            if done is not None:
                return done
        return self._queue.submit(job, self._seconds)

    def _notify_others(self) -> None:
        if self._ops is not None:
            self._ops.give_up()
        elif self._setup_peers is not None:
            self._setup_peers.leave()

    def _lost_peer(self) -> tuple[int, int] | None:
        if self._ops is None:
            return None if self._setup_peers is None else self._setup_peers.lost_peer()
        return self._ops.lost_peer()

    @property
    def _open_ops(self) -> CollectiveOps:
        """Raises: CclError after shutdown."""
        if self._ops is None:
            raise CclError("the group was destroyed")
        return self._ops

    @property
    def _gloo(self) -> Any:
        """Raises: CclError after shutdown."""
        if self._direct is None:
            raise CclError("the group was destroyed")
        return self._direct

    def getBackendName(self) -> str:  # noqa: N802 - torch's name, as the four below
        """ccl."""
        return "ccl"

    def getGroupName(self) -> str:  # noqa: N802
        """The name set by torch."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Effect: sets the name."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description set by torch."""
        return self._names["description"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Effect: sets the description."""
        self._names["description"] = description

    # torch 2.15 asks the backends of any group what they can do, not only those of its own class.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        """For the CPU this group, which has no backends below it. Raises: RuntimeError for any other device."""
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    # torch before 2.6 asks its own C++ code for names instead of the methods above.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.all_reduce."""
        opts = opts or AllreduceOptions()
        tensor = argument_checks.single(tensors)
        reduction = find_reduction(opts.reduceOp, tensor.dtype)
        return self._submit(_then(tensors, self._open_ops.all_reduce, tensor, reduction), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.all_reduce_coalesced."""
        opts = opts or AllreduceOptions()
        argument_checks.check(tensors)
        reductions = [find_reduction(opts.reduceOp, tensor.dtype) for tensor in tensors]
        return self._submit(_each(tensors, self._open_ops.all_reduce, tensors, reductions), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.broadcast."""
        opts = opts or BroadcastOptions()
        tensor = argument_checks.single(tensors)
        return self._submit(_then(tensors, self._open_ops.broadcast, tensor, root=opts.rootRank), opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.reduce."""
        opts = opts or ReduceOptions()
        tensor, root = argument_checks.single(tensors), opts.rootRank
        reduction = find_reduction(opts.reduceOp, tensor.dtype)
        return self._submit(_then(tensors, self._open_ops.reduce, tensor, reduction, root=root), opts)

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.all_gather; the ranks' tensors may differ in size."""
        source, targets = argument_checks.single(input_tensors), argument_checks.single_list(output_tensors, self._size)
        argument_checks.check_same_type([*targets, source])
        argument_checks.check_match(targets[self._rank], source, "output of this rank", "input")
        job = _then(output_tensors[0], self._open_ops.all_gather_list, targets, source, rank=self._rank)
        return self._submit(job, opts or AllgatherOptions())

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        argument_checks.check_whole(output, source, self._size)
        return self._submit(_then([output], self._open_ops.all_gather, output, source), opts or AllgatherOptions())

    all_gather_single = _allgather_base

    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.all_gather_coalesced: one list of outputs for each rank."""
        argument_checks.check(input_list)
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        gather = partial(self._open_ops.all_gather_list, rank=self._rank)
        return self._submit(_each(output_lists, gather, columns, input_list), opts or AllgatherOptions())

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several all_gather_into_tensor in one."""
        for output, source in zip(outputs, inputs, strict=True):
            argument_checks.check_whole(output, source, self._size)
        return self._submit(_each(outputs, self._open_ops.all_gather, outputs, inputs), opts or AllgatherOptions())

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.gather."""
        opts = opts or GatherOptions()
        source, root = argument_checks.single(input_tensors), opts.rootRank
        targets = argument_checks.single_list(output_tensors, self._size) if root == self._rank else None
        for target in targets or ():
            argument_checks.check_match(target, source, "output", "input")
        return self._submit(_then(targets or [], self._open_ops.gather, targets, source, root=root), opts)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any = None) -> Work:
        """As torch.distributed.scatter."""
        opts = opts or ScatterOptions()
        target, root = argument_checks.single(output_tensors), opts.rootRank
        sources = argument_checks.single_list(input_tensors, self._size) if root == self._rank else None
        for source in sources or ():
            argument_checks.check_match(source, target, "input", "output")
        job = _then(output_tensors, self._open_ops.scatter, target, sources, root=root)
        return self._submit(job, opts)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any = None) -> Work:
        """As torch.distributed.reduce_scatter; the ranks' parts may differ in size."""
        opts = opts or ReduceScatterOptions()
        target, sources = argument_checks.single(output_tensors), argument_checks.single_list(input_tensors, self._size)
        argument_checks.check_same_type([target, *sources])
        argument_checks.check_match(sources[self._rank], target, "input of this rank", "output")
        reduction = find_reduction(opts.reduceOp, target.dtype)
        job = _then(output_tensors, self._open_ops.reduce_scatter_list, target, sources, reduction, rank=self._rank)
        return self._submit(job, opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        opts = opts or ReduceScatterOptions()
        argument_checks.check_whole(source, output, self._size)
        reduction = find_reduction(opts.reduceOp, output.dtype)
        return self._submit(_then([output], self._open_ops.reduce_scatter, output, source, reduction), opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several reduce_scatter_tensor in one."""
        opts = opts or ReduceScatterOptions()
        for output, source in zip(outputs, inputs, strict=True):
            argument_checks.check_whole(source, output, self._size)
        reductions = [find_reduction(opts.reduceOp, output.dtype) for output in outputs]
        return self._submit(_each(outputs, self._open_ops.reduce_scatter, outputs, inputs, reductions), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As torch.distributed.all_to_all_single."""
        argument_checks.check_same_type([output, source])
        opts = opts or AllToAllOptions()
        if not output_split_sizes and not input_split_sizes:
            argument_checks.check_even(output, source, self._size)
            return self._submit(_then([output], self._open_ops.all_to_all, output, source), opts)
        flat = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        targets = argument_checks.split(flat, output_split_sizes, self._size)
        sources = argument_checks.split(source, input_split_sizes, self._size)
        job = _then([output], self._open_ops.all_to_all_list, targets, sources)
        return self._submit(job if flat is output else _copying(job, flat, output), opts)

    all_to_all_single = alltoall_base

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """As torch.distributed.all_to_all; sizes may differ."""
        argument_checks.check([*output_tensors, *input_tensors])
        argument_checks.check_same_type([*output_tensors, *input_tensors])
        argument_checks.check_count(output_tensors, self._size)
        argument_checks.check_count(input_tensors, self._size)
        job = _then(output_tensors, self._open_ops.all_to_all_list, output_tensors, input_tensors)
        return self._submit(job, opts or AllToAllOptions())

    def barrier(self, opts: Any = None) -> Work:
        """As torch.distributed.barrier."""
        return self._submit(_then([], self._open_ops.barrier), opts or BarrierOptions())

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        """As torch.distributed.send, by gloo: oneCCL has no send for host memory."""
        return self._gloo.send(tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        """As torch.distributed.recv, by gloo."""
        return self._gloo.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """As torch.distributed.recv without a source, by gloo."""
        return self._gloo.recv_anysource(tensors, tag)

    def shutdown(self) -> None:
        """Effect: finishes all submitted works, then leaves the group; does nothing the second time."""
        ops, self._ops = self._ops, None
        if ops is None:
            return
        try:
            if self._queue.broken is None:
                self._queue.submit(partial(group_setup.leave, ops), self._seconds).wait()
        finally:
            self._end("it was destroyed")

    def abort(self) -> None:
        """Effect: all works of the group fail, in this rank and in the others, now and later."""
        self._queue.give_up(CclError("it was aborted"))
        self._ops = None
        self._end("it was aborted")

    def __del__(self) -> None:
        """Effect: ends the group's thread: torch before 2.6 destroys groups by dropping them, without shutdown."""
        if getattr(self, "_ops", None) is not None and self._is_in_memory:
            self._queue.executor.close()

    def _end(self, why: str) -> None:
        """Effect: the group accepts no more works, and its own thread ends."""
        self._queue.broken = self._queue.broken or CclError(why)
        self._direct = None  # Ends gloo's threads and connections even if this object lives on.
        if self._is_in_memory:
            self._queue.executor.close()


def _then(result: Sequence[Tensor], function: Callable[..., None], *arguments: Any, **named: Any) -> Callable[[], Any]:
    """A job that calls the function and returns its output tensors. Raises: ValueError if they cannot be written to."""
    argument_checks.check_writable(result)

    def job() -> Any:
        function(*arguments, **named)
        return result

    return job


def _each(result: Any, function: Callable[..., None], *columns: Sequence[Any]) -> Callable[[], Any]:
    """A job that calls the function for each row of the columns and returns `result`."""

    def job() -> Any:
        for row in zip(*columns, strict=True):
            function(*row)
        return result

    return job


def _copying(job: Callable[[], Any], source: Tensor, target: Tensor) -> Callable[[], Any]:
    """The job, followed by a copy from source to target."""

    def longer() -> Any:
        result = job()
        target.copy_(source)
        return result

    return longer
