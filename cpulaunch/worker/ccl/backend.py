"""The process group "ccl", whose collectives become jobs for the executor of the group."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
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

from cpulaunch.worker.ccl import argument_checks as checks
from cpulaunch.worker.ccl import group_setup
from cpulaunch.worker.ccl.collective_ops import CollectiveOps
from cpulaunch.worker.ccl.delegate import open_gloo
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.methods import by_gloo, call_of, calls_of, collective, listed, options
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import find_reduction
from cpulaunch.worker.ccl.works.executor import Executor, GroupQueue, shared_executor
from cpulaunch.worker.ccl.works.thread_setup import thread_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

    Tensors = list[Tensor]

_NO_TIME = timedelta(0)


def _leave_all(peers: list[Any]) -> None:
    for each in peers:
        each.leave()


def _first_lost(peers: list[Any]) -> tuple[int, int] | None:
    return next((lost for each in list(peers) if (lost := each.lost_peer())), None)


class CclGroup(ProcessGroup):
    """One rank of a group. Collectives take the memory path or oneCCL; send, recv and what neither supports, gloo.

    Each collective returns a work. The methods accept what those of torch's ProcessGroup accept, and check those
    arguments that torch itself does not check.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Effect: waits for all ranks of the group. Raises: CclError."""
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._names = {"name": "", "description": "undefined"}
        self._ops: CollectiveOps | None = None
        self._gloo: Any = None
        self._has_shown_gloo = False
        # How to reach the other ranks: the path, or what connects them during set-up. Works that are kept for a while
        # refer to this list and not to the group, which torch before 2.6 destroys by dropping it.
        self._peers: list[Any] = []
        with group_setup.shared_fate(store, rank) as store:
            path = group_setup.requested_path()
            memory = group_setup.join_memory_path(store, path, rank=rank, size=size, timeout=timeout)
            self._gloo = open_gloo(store, rank, size, timeout)
            self._is_in_memory = isinstance(memory, MemoryPath)
            self._queue = GroupQueue(
                Executor(thread_cpus(os.environ)) if self._is_in_memory else shared_executor(),
                lost_peer=partial(_first_lost, self._peers),
                notify_others=partial(_leave_all, self._peers),
            )
            self.set_timeout(timeout)
            if isinstance(memory, MemoryPath):
                self._ops = CollectiveOps(memory, rank=rank, size=size)
            else:
                join = partial(group_setup.join_oneccl, store, rank, size, self._seconds, on_connect=self._peers.append)
                self._ops = group_setup.join_oneccl_or_not(
                    lambda: self._queue.submit(join, self._seconds).result(), memory, path, rank=rank
                )
            self.path = "memory" if self._is_in_memory else "oneccl" if self._ops else "gloo"
            self.uses_gloo = self._ops is None
            self._peers[:] = [] if self._ops is None else [self._ops.path]
        self._leave_if_dropped = weakref.finalize(self, group_setup.leave_dropped, self._queue, self._ops)
        self._leave_if_dropped.atexit = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Effect: changes the group's timeout, gloo's too."""
        self._seconds = timeout.total_seconds()
        if self._gloo is not None:
            self._gloo._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        if self._ops is not None:
            self._ops.path.set_timeout(self._seconds)

    def _adopt_timeout(self) -> None:
        """Effect: the timeout is that of gloo's backend, on which torch sets the timeout of a group."""
        timeout = self.gloo._get_backend(torch.device("cpu")).options._timeout
        if timeout.total_seconds() != self._seconds:
            self.set_timeout(timeout)

    def submit(self, job: Callable[[], Any], options: Any) -> Work:
        """The work of a job. On the memory path, a synchronous call runs its job in the calling thread."""
        if self._has_shown_gloo:
            self._adopt_timeout()
        timeout, seconds = options.timeout, self._seconds
        if timeout > _NO_TIME:
            seconds = timeout.total_seconds()
            job = self._limited(job, seconds)
        if self._is_in_memory and not getattr(options, "asyncOp", True):
            done = self._queue.do_now(job)
            if done is not None:
                return done
        return self._queue.submit(job, seconds)

    def _limited(self, job: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        """The job with a timeout of its own."""
        set_timeout = self._open_ops.path.set_timeout

        def limited() -> Any:
            set_timeout(seconds)
            try:
                return job()
            finally:
                set_timeout(self._seconds)

        return limited

    @property
    def _open_ops(self) -> CollectiveOps:
        """Raises: CclError after shutdown."""
        if self._ops is None:
            raise CclError("the group was destroyed")
        return self._ops

    def _root(self, options: Any) -> int:
        """The root's rank. Raises: ValueError unless it is a rank of the group."""
        root: int = options.rootRank
        if not 0 <= root < self._size:
            raise ValueError(f"invalid root rank {root} in a group of {self._size} ranks")
        return root

    @property
    def gloo(self) -> Any:
        """gloo's group of the same ranks. Raises: CclError after shutdown."""
        if self._gloo is None:
            raise CclError("the group was destroyed")
        return self._gloo

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
    # torch before 2.6 asks its own C++ code for names instead of the methods above.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        """The CPU: torch asks this of a group before it uses it for checkpoints."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """gloo's backend for the CPU, since torch takes only a C++ object. Raises: RuntimeError for other devices."""
        self._has_shown_gloo = True
        return self.gloo._get_backend(torch.device(device))

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As torch.distributed.monitored_barrier, by gloo."""
        timeout = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        timeout = timedelta(seconds=self._seconds) if timeout is None else timeout  # One of zero only looks.
        self.gloo.monitored_barrier(timeout, wait_all_ranks)

    barrier_by_gloo = monitored_barrier

    @collective
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        """As torch.distributed.all_reduce."""
        opts = options(AllreduceOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        tensor = checks.single(tensors := listed(tensors))
        return call_of(tensors, self._open_ops.all_reduce, tensor, find_reduction(opts.reduceOp, tensor.dtype)), opts

    @collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """As torch.distributed.all_reduce_coalesced, whose options are of a type of their own."""
        opts = AllreduceOptions() if opts is None else opts
        plain = [checks.plain(tensor) for tensor in tensors]
        reductions = [find_reduction(opts.reduceOp, tensor.dtype) for tensor in plain]
        return calls_of(tensors, self._open_ops.all_reduce, plain, reductions), opts

    @collective
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        """As torch.distributed.broadcast."""
        opts = options(BroadcastOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        tensor = checks.single(tensors := listed(tensors))
        return call_of(tensors, self._open_ops.broadcast, tensor, root=self._root(opts)), opts

    @collective
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        """As torch.distributed.reduce."""
        opts = options(ReduceOptions, opts, rootRank=opts if root is None else root, reduceOp=op, timeout=timeout)
        tensor = checks.single(tensors := listed(tensors))
        reduction = find_reduction(opts.reduceOp, tensor.dtype)
        return call_of(tensors, self._open_ops.reduce, tensor, reduction, root=self._root(opts)), opts

    @collective
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: Any = None) -> Any:
        """As torch.distributed.all_gather; the ranks' tensors may differ in size."""
        outputs = [output_tensors] if isinstance(input_tensors, torch.Tensor) else output_tensors
        source, targets = checks.single(listed(input_tensors)), checks.single_list(outputs, self._size)
        checks.check_same_type([*targets, source])
        checks.check_match(targets[self._rank], source, "output of this rank", "input")
        job = call_of(outputs[0], self._open_ops.all_gather_list, targets, source)
        return job, options(AllgatherOptions, opts, timeout=timeout)

    @collective
    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        target, source = checks.plain(output), checks.plain(source)
        checks.check_whole(target, source, self._size)
        return call_of([output], self._open_ops.all_gather, target, source), options(AllgatherOptions, opts)

    all_gather_single = _allgather_base

    @collective
    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> Any:
        """As torch.distributed.all_gather_coalesced: one list of outputs for each rank."""
        sources = [checks.plain(source) for source in input_list]
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        return calls_of(output_lists, self._open_ops.all_gather_list, columns, sources), options(AllgatherOptions, opts)

    @collective
    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Several all_gather_into_tensor in one."""
        targets, sources = ([checks.plain(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        for target, source in zip(targets, sources, strict=True):
            checks.check_whole(target, source, self._size)
        return calls_of(outputs, self._open_ops.all_gather, targets, sources), options(AllgatherOptions, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @collective
    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Any:
        """As torch.distributed.gather."""
        opts = options(GatherOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        outputs = [output_tensors] if isinstance(input_tensors, torch.Tensor) else output_tensors
        source = checks.single(listed(input_tensors))
        targets = checks.single_list(outputs, self._size) if opts.rootRank == self._rank else None
        for target in targets or ():
            checks.check_match(target, source, "output", "input")
        return call_of(targets or [], self._open_ops.gather, targets, source, root=self._root(opts)), opts

    @collective
    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Any:
        """As torch.distributed.scatter."""
        opts = options(ScatterOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        inputs = [input_tensors] if isinstance(output_tensors, torch.Tensor) else input_tensors
        target = checks.single(outputs := listed(output_tensors))
        sources = checks.single_list(inputs, self._size) if opts.rootRank == self._rank else None
        for source in sources or ():
            checks.check_match(source, target, "input", "output")
        return call_of(outputs, self._open_ops.scatter, target, sources, root=self._root(opts)), opts

    @collective
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        """As torch.distributed.reduce_scatter; the ranks' parts may differ in size."""
        opts = options(ReduceScatterOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        inputs = [input_tensors] if isinstance(output_tensors, torch.Tensor) else input_tensors
        target, sources = checks.single(outputs := listed(output_tensors)), checks.single_list(inputs, self._size)
        checks.check_same_type([target, *sources])
        checks.check_match(sources[self._rank], target, "input of this rank", "output")
        reduction = find_reduction(opts.reduceOp, target.dtype)
        return call_of(outputs, self._open_ops.reduce_scatter_list, target, sources, reduction), opts

    @collective
    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        opts = options(ReduceScatterOptions, opts)
        target, source = checks.plain(output), checks.plain(source)
        checks.check_whole(source, target, self._size)
        reduction = find_reduction(opts.reduceOp, target.dtype)
        return call_of([output], self._open_ops.reduce_scatter, target, source, reduction), opts

    reduce_scatter_single = _reduce_scatter_base

    @collective
    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Several reduce_scatter_tensor in one."""
        opts = options(ReduceScatterOptions, opts)
        targets, sources = ([checks.plain(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        for target, source in zip(targets, sources, strict=True):
            checks.check_whole(source, target, self._size)
        reductions = [find_reduction(opts.reduceOp, target.dtype) for target in targets]
        return calls_of(outputs, self._open_ops.reduce_scatter, targets, sources, reductions), opts

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    @collective
    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Any:
        """As torch.distributed.all_to_all_single."""
        target, source = checks.plain(output), checks.plain(source)
        checks.check_same_type([target, source])
        sent = checks.split_elements(source, input_split_sizes, self._size)
        expected = checks.split_elements(target, output_split_sizes, self._size)
        job = call_of([output], self._open_ops.all_to_all, target, source, (sent, expected))
        return job, options(AllToAllOptions, opts)

    all_to_all_single = alltoall_base

    @collective
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Any:
        """As torch.distributed.all_to_all; sizes may differ."""
        targets, sources = (checks.per_rank(tensors, self._size) for tensors in (output_tensors, input_tensors))
        checks.check_same_type([*targets, *sources])
        job = call_of(output_tensors, self._open_ops.all_to_all_list, targets, sources)
        return job, options(AllToAllOptions, opts)

    @collective
    def barrier(self, opts: Any = None, *, timeout: Any = None) -> Any:
        """As torch.distributed.barrier."""
        return call_of([], self._open_ops.barrier), options(BarrierOptions, opts, timeout=timeout)

    send, recv, recv_anysource = by_gloo("send"), by_gloo("recv"), by_gloo("recv_anysource")

    def shutdown(self) -> None:
        """Effect: finishes all submitted works, then leaves the group; does nothing the second time.

        The error of a work that fails meanwhile is for those who wait for that work.
        """
        ops, self._ops = self._ops, None
        try:
            if ops is not None and self._queue.broken is None:
                leave = partial(group_setup.leave, ops)
                with suppress(RuntimeError):
                    # At once if it may: a program that ends cannot start the thread.
                    if not (self._is_in_memory and self._queue.do_now(leave)):
                        self._queue.submit(leave, self._seconds).wait()
        finally:
            self._peers.clear()
            self._end("it was destroyed")

    def abort(self) -> None:
        """Effect: all works of the group fail, in this rank and in the others, now and later."""
        self._queue.give_up(CclError("it was aborted"))
        self._ops = None
        self._peers.clear()
        self._end("it was aborted")

    def _end(self, why: str) -> None:
        """Effect: the group accepts no more works, and its own thread ends."""
        self._queue.broken = self._queue.broken or CclError(why)
        self._leave_if_dropped.detach()
        self._gloo = None  # Ends gloo's threads and connections even if this object lives on.
        if self._is_in_memory:
            self._queue.executor.close()
