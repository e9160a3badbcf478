"""The process group "ccl", whose collectives become jobs for the executor of the group."""

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from cpulaunch.worker.ccl import group_setup, methods
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.methods import collective, in_turn, listed, per_rank, plain
from cpulaunch.worker.ccl.oneccl.path import OnecclPath
from cpulaunch.worker.ccl.wire.collectives import Tensors
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import find_reduction
from cpulaunch.worker.ccl.works.executor import Executor, GroupQueue, shared_executor
from cpulaunch.worker.ccl.works.thread_setup import thread_cpus

_NO_TIME = timedelta(0)


def _leave_all(peers: list[Any]) -> None:
    for each in peers:
        each.leave()


def _first_lost(peers: list[Any]) -> tuple[int, int] | None:
    return next((lost for each in list(peers) if (lost := each.lost_peer())), None)


def _name(key: str) -> tuple[Callable[[Any], str], Callable[[Any, str], None]]:
    """Methods that return and set one of the names that torch gives to a group."""
    return lambda group: group._names[key], lambda group, name: group._names.update({key: name})


def by_gloo(name: str) -> Callable[..., Any]:
    """The method of gloo's group of the same ranks."""
    return lambda group, *arguments, **named: getattr(group.gloo, name)(*arguments, **named)


class CclGroup(c10d.ProcessGroup):
    """One rank of a group. Collectives take the memory path or oneCCL; send, recv and what neither supports, gloo.

    Each collective returns a work. The methods accept what those of torch's ProcessGroup accept, and check those
    arguments that torch itself does not check.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Effect: waits for all ranks of the group. Raises: CclError."""
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._names = {"name": "", "description": "undefined"}
        self._ops: MemoryPath | OnecclPath | None = None
        self._gloo: Any = None
        self._has_shown_gloo = False
        # How to reach the other ranks: the path, or what connects them during set-up. Works that are kept for a while
        # refer to this list and not to the group, which torch before 2.6 destroys by dropping it.
        self._peers: list[Any] = []
        with group_setup.shared_fate(store, rank) as store, ExitStack() as after_failure:
            path = group_setup.requested_path()
            memory = group_setup.join_memory_path(store, path, rank=rank, size=size, timeout=timeout)
            self._is_in_memory = isinstance(memory, MemoryPath)
            if isinstance(memory, MemoryPath):
                self._ops = memory
                after_failure.callback(memory.close)  # Ranks that have finished their set-up learn it by this alone.
            self._gloo = group_setup.open_gloo(store, rank, size, timeout, memory)
            self._queue = GroupQueue(
                Executor(thread_cpus(os.environ)) if self._is_in_memory else shared_executor(),
                lost_peer=partial(_first_lost, self._peers),
                notify_others=partial(_leave_all, self._peers),
            )
            self.set_timeout(timeout)
            if isinstance(memory, str):
                join = partial(group_setup.join_oneccl, store, rank, size, self._seconds, on_connect=self._peers.append)
                self._ops = group_setup.join_oneccl_or_not(
                    lambda: self._queue.submit(join, self._seconds).result(), memory, path, rank=rank
                )
            self.path = "memory" if self._is_in_memory else "oneccl" if self._ops else "gloo"
            self.uses_gloo = self._ops is None
            self._peers[:] = [] if self._ops is None else [self._ops]
            after_failure.pop_all()
        self._leave_if_dropped = weakref.finalize(self, group_setup.leave_dropped, self._queue, self._ops)
        self._leave_if_dropped.atexit = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Effect: changes the group's timeout, gloo's too."""
        self._seconds = timeout.total_seconds()
        if self._gloo is not None:
            self._gloo._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        if self._ops is not None:
            self._ops.set_timeout(self._seconds)

    def submit(self, job: Callable[[], Any], options: Any) -> c10d.Work:
        """The work of a job. On the memory path, a synchronous call runs its job in the calling thread."""
        if self._has_shown_gloo:  # torch sets the timeout of a group on gloo's backend.
            default = self.gloo._get_backend(torch.device("cpu")).options._timeout
            if default.total_seconds() != self._seconds:
                self.set_timeout(default)
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
        path = self._open_ops

        def limited() -> Any:
            path.set_timeout(seconds)
            try:
                return job()
            finally:
                path.set_timeout(self._seconds)

        return limited

    @property
    def _open_ops(self) -> MemoryPath | OnecclPath:
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

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """ccl."""
        return "ccl"

    getGroupName, setGroupName = _name("name")  # noqa: N815 - torch's names
    getGroupDesc, setGroupDesc = _name("description")  # noqa: N815
    # torch 2.15 asks the backends of any group what they can do, not only those of its own class.
    supports_coalescing = supports_splitting = False
    # torch before 2.6 asks its own C++ code for names instead of the methods above.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    # The CPU: torch asks this of a group before it uses it for checkpoints.
    _device_types = property(lambda self: [torch.device("cpu")])

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
    send, recv, recv_anysource = by_gloo("send"), by_gloo("recv"), by_gloo("recv_anysource")

    # The collectives, by torch's names. Tensors and options are those of torch.distributed's functions.

    @collective(c10d.AllreduceOptions, "op")
    def allreduce(self, opts: Any, tensors: Any) -> Any:
        """As torch.distributed.all_reduce."""
        tensor = plain(*(tensors := listed(tensors)))
        return tensors, partial(self._open_ops.all_reduce, tensor, find_reduction(opts.reduceOp, tensor.dtype))

    @collective(c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, opts: Any, tensors: Tensors) -> Any:
        """As torch.distributed.all_reduce_coalesced."""
        reduce, parts = self._open_ops.all_reduce, [plain(tensor) for tensor in tensors]
        return tensors, in_turn([partial(reduce, part, find_reduction(opts.reduceOp, part.dtype)) for part in parts])

    @collective(c10d.BroadcastOptions, "root")
    def broadcast(self, opts: Any, tensors: Any) -> Any:
        """As torch.distributed.broadcast."""
        tensor = plain(*(tensors := listed(tensors)))
        return tensors, partial(self._open_ops.broadcast, tensor, root=self._root(opts))

    @collective(c10d.ReduceOptions, "root", "op")
    def reduce(self, opts: Any, tensors: Any) -> Any:
        """As torch.distributed.reduce."""
        tensor = plain(*(tensors := listed(tensors)))
        reduction = find_reduction(opts.reduceOp, tensor.dtype)
        return tensors, partial(self._open_ops.reduce, tensor, reduction, root=self._root(opts))

    @collective(c10d.AllgatherOptions)
    def allgather(self, opts: Any, output_tensors: Any, input_tensors: Any) -> Any:
        """As torch.distributed.all_gather; the ranks' tensors may differ in size."""
        targets, source = per_rank(output_tensors, self._size), plain(*listed(input_tensors))
        methods.check_same_type(*targets, source)
        methods.check_match(targets[self._rank], source)
        return targets, partial(self._open_ops.all_gather_list, targets, source)

    @collective(c10d.AllgatherOptions)
    def allgather_coalesced(self, opts: Any, output_lists: list[Tensors], input_list: Tensors) -> Any:
        """As torch.distributed.all_gather_coalesced: one list of outputs for each rank."""
        calls = []
        for outputs, source in zip(zip(*output_lists, strict=True), input_list, strict=True):
            targets, row = per_rank(outputs, self._size), plain(source)
            methods.check_same_type(*targets, row)
            methods.check_match(targets[self._rank], row)
            calls.append(partial(self._open_ops.all_gather_list, targets, row))
        return output_lists, in_turn(calls)

    @collective(c10d.AllgatherOptions)
    def _allgather_base(self, opts: Any, output: Tensor, source: Tensor) -> Any:
        return [output], self._row(output, source)

    @collective(c10d.AllgatherOptions)
    def allgather_into_tensor_coalesced(self, opts: Any, outputs: Tensors, inputs: Tensors) -> Any:
        """Several all_gather_into_tensor in one."""
        return outputs, in_turn([self._row(*pair) for pair in zip(outputs, inputs, strict=True)])

    @collective(c10d.ReduceScatterOptions, "op")
    def _reduce_scatter_base(self, opts: Any, output: Tensor, source: Tensor) -> Any:
        return [output], self._row(output, source, opts.reduceOp)

    @collective(c10d.ReduceScatterOptions, "op")
    def reduce_scatter_tensor_coalesced(self, opts: Any, outputs: Tensors, inputs: Tensors) -> Any:
        """Several reduce_scatter_tensor in one."""
        return outputs, in_turn([self._row(*pair, opts.reduceOp) for pair in zip(outputs, inputs, strict=True)])

    def _row(self, output: Tensor, source: Tensor, operation: Any = None) -> Callable[[], None]:
        """An all-gather, or with an operation a reduce-scatter: the larger tensor has a row for every rank."""
        target, source = plain(output), plain(source)
        if operation is None:
            methods.check_match(target, source, self._size)
            return partial(self._open_ops.run, "all_gather", target, source)
        methods.check_match(source, target, self._size)
        reduction = find_reduction(operation, target.dtype)
        return partial(self._open_ops.run, "reduce_scatter", target, source, reduction=reduction)

    @collective(c10d.GatherOptions, "root")
    def gather(self, opts: Any, output_tensors: Any, input_tensors: Any) -> Any:
        """As torch.distributed.gather."""
        source, root = plain(*listed(input_tensors)), self._root(opts)
        targets = per_rank(output_tensors, self._size) if root == self._rank else None
        for target in targets or ():
            methods.check_match(target, source)
        return targets or [], partial(self._open_ops.run, "gather", targets, source, root=root)

    @collective(c10d.ScatterOptions, "root")
    def scatter(self, opts: Any, output_tensors: Any, input_tensors: Any) -> Any:
        """As torch.distributed.scatter."""
        target, root = plain(*(outputs := listed(output_tensors))), self._root(opts)
        sources = per_rank(input_tensors, self._size) if root == self._rank else None
        for source in sources or ():
            methods.check_match(source, target)
        return outputs, partial(self._open_ops.run, "scatter", target, sources, root=root)

    @collective(c10d.ReduceScatterOptions, "op")
    def reduce_scatter(self, opts: Any, output_tensors: Any, input_tensors: Any) -> Any:
        """As torch.distributed.reduce_scatter; the ranks' parts may differ in size."""
        target, sources = plain(*(outputs := listed(output_tensors))), per_rank(input_tensors, self._size)
        methods.check_same_type(target, *sources)
        methods.check_match(sources[self._rank], target)
        reduction = find_reduction(opts.reduceOp, target.dtype)
        return outputs, partial(self._open_ops.reduce_scatter_list, target, sources, reduction)

    @collective(c10d.AllToAllOptions)
    def alltoall_base(
        self, opts: Any, output: Tensor, source: Tensor, output_split_sizes: Any = (), input_split_sizes: Any = ()
    ) -> Any:
        """As torch.distributed.all_to_all_single."""
        target, row = plain(output), plain(source)
        methods.check_same_type(target, row)
        pairs = (row, input_split_sizes), (target, output_split_sizes)
        splits = [methods.split_elements(tensor, rows, self._size) for tensor, rows in pairs]
        return [output], partial(self._open_ops.run, "all_to_all", target, row, splits=splits)

    @collective(c10d.AllToAllOptions)
    def alltoall(self, opts: Any, output_tensors: Tensors, input_tensors: Tensors) -> Any:
        """As torch.distributed.all_to_all; sizes may differ."""
        targets, sources = (per_rank(tensors, self._size) for tensors in (output_tensors, input_tensors))
        methods.check_same_type(*targets, *sources)
        splits = [[each.numel() for each in tensors] for tensors in (sources, targets)]
        return targets, partial(self._open_ops.run, "all_to_all", targets, sources, splits=splits)

    @collective(c10d.BarrierOptions)
    def barrier(self, opts: Any) -> Any:
        """As torch.distributed.barrier."""
        return [], self._open_ops.barrier

    # Newer names of torch's.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

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
            self._end("it was destroyed")

    def abort(self) -> None:
        """Effect: the group's works fail, here and in other ranks, now and later, but one there that has its data."""
        self._queue.give_up(CclError("it was aborted"))
        self._ops = None
        self._end("it was aborted")

    def _end(self, why: str) -> None:
        """Effect: the group accepts no more works, and its own thread ends."""
        self._peers.clear()
        self._queue.broken = self._queue.broken or CclError(why)
        self._leave_if_dropped.detach()
        self._gloo = None  # Ends gloo's threads and connections even if this object lives on.
        if self._is_in_memory:
            self._queue.executor.close()
