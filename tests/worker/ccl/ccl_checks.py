"""Checks that compare each collective with gloo: types, reductions, sizes, layouts. Each check runs on all ranks."""

import itertools
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
MOVED = (*FLOATS, *INTEGERS, torch.bool)
OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
SIZES = {"none": (0,), "one": (1,), "odd": (7,), "rows": (12, 5), "large": (70_001,)}
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def values(shape, dtype, seed=0):
    """Small random numbers, different in each rank; their sums and products are exact in all but 16-bit types."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    drawn = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=generator)
    return drawn.to(dtype)


def same(mine, theirs):
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs)


def come_later(is_late, seconds=0.1):
    """Effect: this rank comes later than the others, if it is to: nothing tells it that they have come and wait."""
    time.sleep(seconds * is_late)


def add_reductions():
    for (name, operation), dtype in itertools.product(OPERATIONS.items(), (*FLOATS, *INTEGERS)):

        def all_reduce(gloo, operation=operation, dtype=dtype):
            for shape in SIZES.values():
                mine = values(shape, dtype)
                theirs = mine.clone()
                dist.all_reduce(mine, operation)
                dist.all_reduce(theirs, operation, group=gloo)
                same(mine, theirs)

        def reduce(gloo, operation=operation, dtype=dtype):
            root = dist.get_world_size() - 1
            mine = values((11,), dtype)
            theirs = mine.clone()
            before = mine.clone()
            dist.reduce(mine, root, operation)
            dist.reduce(theirs, root, operation, group=gloo)
            same(mine, theirs if dist.get_rank() == root else before)

        def reduce_scatter(gloo, operation=operation, dtype=dtype):
            size, rank = dist.get_world_size(), dist.get_rank()
            source = values((size * 6, 2), dtype)
            theirs = source.clone()
            dist.all_reduce(theirs, operation, group=gloo)
            mine = torch.empty(6, 2, dtype=dtype)
            dist.reduce_scatter_tensor(mine, source, operation)
            same(mine, theirs.chunk(size)[rank])
            listed = torch.empty(6, 2, dtype=dtype)
            dist.reduce_scatter(listed, list(source.chunk(size)), operation)
            same(listed, mine)

        kind = f"{name}_{str(dtype).removeprefix('torch.')}"
        CHECKS[f"all_reduce_{kind}"] = all_reduce
        CHECKS[f"reduce_{kind}"] = reduce
        CHECKS[f"reduce_scatter_{kind}"] = reduce_scatter


add_reductions()


@check
def average_equals_sum_divided_by_size(gloo):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        mine = values((9,), dtype)
        theirs = mine.clone()
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        dist.all_reduce(theirs, group=gloo)
        same(mine, theirs / dist.get_world_size())


@check
def average_of_a_reduce_scatter(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    source = values((size * 3,), torch.float32)
    theirs = source.clone()
    dist.all_reduce(theirs, group=gloo)
    mine = torch.empty(3)
    dist.reduce_scatter_tensor(mine, source, dist.ReduceOp.AVG)
    same(mine, theirs.chunk(size)[rank] / size)


@check
def average_of_integers_is_truncated(gloo):
    mine = torch.full((3,), dist.get_rank(), dtype=torch.int64)
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    size = dist.get_world_size()
    same(mine, torch.full((3,), sum(range(size)) // size))


@check
def reduced_bools_are_zero_or_one(gloo):
    rank = dist.get_rank()
    table = {dist.ReduceOp.SUM: True, dist.ReduceOp.MAX: True, dist.ReduceOp.PRODUCT: False, dist.ReduceOp.MIN: False}
    for operation, expected in table.items():
        mine = torch.tensor([rank == 0, True, False])
        dist.all_reduce(mine, operation)
        assert mine.tolist() == [expected, True, False]
        assert mine.view(torch.uint8).max() <= 1


@check
def what_ccl_does_not_support_is_left_to_gloo(gloo):
    size = dist.get_world_size()
    for name, dtype in itertools.product(("BAND", "BOR", "BXOR"), (torch.int32, torch.uint8, torch.bool)):
        mine = torch.tensor([1, 0, dist.get_rank() % 2]).to(dtype)
        theirs = mine.clone()
        dist.all_reduce(mine, getattr(dist.ReduceOp, name))
        dist.all_reduce(theirs, getattr(dist.ReduceOp, name), group=gloo)
        same(mine, theirs)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    same(sparse.to_dense(), torch.eye(3) * size)
    with pytest.raises(RuntimeError):  # As with gloo.
        dist.all_reduce(torch.ones(2, dtype=torch.int16))


@check
def methods_accept_what_those_of_torch_do(gloo):
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for tensors in (torch.ones(3), [torch.ones(3)]):
        group.allreduce(tensors, op=dist.ReduceOp.SUM).wait()
        group.allreduce(tensors, dist.ReduceOp.MAX).wait()
        same(tensors[0] if isinstance(tensors, list) else tensors, torch.full((3,), float(size)))
    tensor = torch.full((2,), float(rank))
    group.broadcast(tensor, root=size - 1).wait()
    same(tensor, torch.full((2,), size - 1.0))
    group.reduce(tensor, 0, op=dist.ReduceOp.MAX).wait()
    outputs = [torch.empty(1) for _ in range(size)]
    group.allgather(outputs, torch.tensor([float(rank)])).wait()
    group.scatter(tensor[:1], outputs if rank == 0 else [], 0).wait()
    same(tensor[:1], torch.tensor([float(rank)]))
    group.gather(outputs if rank == 0 else [], tensor[:1], root=0).wait()
    group.reduce_scatter(tensor[:1], outputs, op=dist.ReduceOp.MAX).wait()
    group.barrier().wait()
    dist.monitored_barrier()
    assert group._device_types == [torch.device("cpu")]
    assert group._get_backend(torch.device("cpu")) is not None
    assert group.get_group_store() is not None


@check
def splits_may_be_given_by_some_ranks_only(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    source, mine = torch.arange(2.0 * size) + 100 * rank, torch.empty(2 * size)
    dist.all_to_all_single(mine, source, *([[2] * size] * 2 if rank else [None, None]))
    same(mine, torch.cat([torch.arange(2.0) + 2 * rank + 100 * other for other in range(size)]))


@check
def tensors_of_other_kinds(gloo):
    import torch.distributed._functional_collectives as functional
    from torch._subclasses import FakeTensorMode

    size = dist.get_world_size()
    pending = functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD)
    dist.all_reduce(pending)
    same(pending + 0, torch.full((5,), float(size * size)))
    if torch.__version__ >= "2.6":  # Earlier ones refuse it with gloo too.
        with FakeTensorMode():
            dist.all_reduce(torch.ones(5))
    one = torch.ones(3, 1)
    one = one.as_strided((3, 1), (1, 0))
    dist.all_reduce(one)
    same(one.clone(), torch.full((3, 1), float(size)))


@check
def the_profiler_shows_collectives(gloo):
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(5))
    assert "ccl:all_reduce" in [event.key for event in profile.key_averages()]


@check
def callbacks_keep_the_order_of_works(gloo):
    """The callback's all-reduce comes last on every rank, whenever its rank reaches it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for late, asks_first in itertools.product(range(size), (False, True)):
        a, b, c = torch.ones(8), torch.full((8,), 10.0 * (1 + rank)), torch.full((8,), 100.0 * (1 + rank))
        first = dist.all_reduce(a, async_op=True)
        future = first.get_future() if asks_first else None
        second = dist.all_reduce(b, async_op=True)
        come_later(rank == late)
        future = first.get_future() if future is None else future
        third = future.then(lambda _, c=c: dist.all_reduce(c, async_op=True)).wait()
        third.wait()
        second.wait()
        total = size * (size + 1) / 2
        same(b, torch.full((8,), 10 * total))
        same(c, torch.full((8,), 100 * total))


@check
def callbacks_within_callbacks_keep_the_order_of_calls(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for late in range(size):
        x, y, z = (torch.full((4,), each) for each in (10.0, 100.0, 1000.0))
        done = threading.Event()

        def last(_, z=z, done=done):
            dist.all_reduce(z, async_op=True).get_future().then(lambda _: done.set())

        def first(_, x=x, y=y, last=last):
            work = dist.all_reduce(x, async_op=True)
            dist.all_reduce(y, async_op=True)
            work.get_future().then(last)

        come_later(rank == late)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        come_later(rank == late)
        work.get_future().then(first)
        assert done.wait(60)
        dist.barrier()
        for tensor, value in ((x, 10.0), (y, 100.0), (z, 1000.0)):
            same(tensor, torch.full((4,), value * size))


@check
def a_callback_of_another_future_keeps_the_order_of_calls(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for late in range(size):
        a, b, c = (torch.full((4,), each) for each in (1.0, 10.0, 100.0))
        done, future = threading.Event(), torch.futures.Future()

        def called(_, c=c, done=done):
            dist.all_reduce(c, async_op=True).get_future().then(lambda _: done.set())

        future.then(called)
        come_later(rank == late)
        work = dist.all_reduce(a, async_op=True)
        dist.all_reduce(b, async_op=True)
        come_later(rank == late)
        work.get_future().then(lambda _, future=future: future.set_result(1))
        assert done.wait(60)
        dist.barrier()
        for tensor, value in ((a, 1.0), (b, 10.0), (c, 100.0)):
            same(tensor, torch.full((4,), value * size))


@check
def callbacks_that_wait_run_one_after_another(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for late in range(size):
        x, y, z = (torch.full((4,), each) for each in (10.0, 100.0, 1000.0))
        come_later(rank == late)
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        come_later(rank == late)
        works[0].get_future().then(lambda _, x=x, y=y: (dist.all_reduce(x), dist.all_reduce(y)))
        works[1].get_future().then(lambda _, z=z: dist.all_reduce(z))
        dist.barrier()
        for tensor, value in ((x, 10.0), (y, 100.0), (z, 1000.0)):
            same(tensor, torch.full((4,), value * size))


@check
def a_group_of_synchronous_calls_starts_no_thread(gloo):
    """Python does not let a program that ends start one."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    if group.path == "memory" and hasattr(dist.AllreduceOptions(), "asyncOp"):
        group.shutdown()
        assert group._queue.executor._thread is None


@check
def a_wait_ends_after_the_callbacks(gloo):
    for number in range(20):
        done = []
        work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        work.get_future().then(lambda _, done=done: (time.sleep(0.01), done.append(True)))
        time.sleep(0.002 * (number % 2))
        work.wait()
        assert done


@check
def a_call_may_wait_longer_than_the_group(gloo):
    """The group's limit is short only while each call has one of its own: under load, any call may take seconds."""
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=60)
    for asynchronous in (False, True):
        if hasattr(options, "asyncOp"):
            options.asyncOp = asynchronous
        come_later(dist.get_rank() == 0, seconds=2)
        group.barrier(options).wait()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), group)
    dist.all_reduce(torch.ones(1), group=group)


@check
def a_wait_may_time_out_and_be_repeated(gloo):
    tensor = torch.ones(3)
    come_later(dist.get_rank() == 0, seconds=0.5)
    work, waits = dist.all_reduce(tensor, async_op=True), 0
    while True:
        waits += 1
        try:
            assert work.wait(timedelta(seconds=0.1))
        except RuntimeError:
            continue
        break
    assert waits > 1 or dist.get_rank() == 0
    same(tensor, torch.full((3,), float(dist.get_world_size())))


@check
def split_sizes_of_numpy(gloo):
    numpy = pytest.importorskip("numpy")
    size = dist.get_world_size()
    splits = numpy.array([2] * size)
    mine, theirs = torch.empty(2 * size), torch.empty(2 * size)
    source = values((2 * size,), torch.float32)
    dist.all_to_all_single(mine, source, splits, splits)
    dist.all_to_all_single(theirs, source, splits, splits, group=gloo)
    same(mine, theirs)


@check
def uneven_inputs_with_the_number_of_active_ranks(gloo):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(3 + 2 * dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()


@check
def all_reduce_coalesced(gloo):
    mine = [values((3,), torch.float32), values((2, 2), torch.int64), values((0,), torch.float64)]
    theirs = [tensor.clone() for tensor in mine]
    with dist._coalescing_manager(async_ops=False):
        for tensor in mine:
            dist.all_reduce(tensor)
    for tensor in theirs:
        dist.all_reduce(tensor, group=gloo)
    for one, other in zip(mine, theirs, strict=True):
        same(one, other)


@check
def all_reduce_coalesced_reduces_as_asked(gloo):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.tensor([float(rank)]), torch.tensor([rank, -1.0 * rank])]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    same(tensors[0], torch.tensor([size - 1.0]))
    same(tensors[1], torch.tensor([size - 1.0, 0.0]))


@check
def broadcast(gloo):
    for dtype, shape in itertools.product((*MOVED, torch.complex64, torch.int16), SIZES.values()):
        for root in range(dist.get_world_size()):
            mine = values(shape, dtype)
            theirs = mine.clone()
            dist.broadcast(mine, root)
            # gloo does not support all of these types.
            dist.broadcast(
                theirs.contiguous().view(torch.uint8) if theirs.numel() else theirs.float(), root, group=gloo
            )
            same(mine, theirs)


@check
def all_gather(gloo):
    size = dist.get_world_size()
    for dtype, shape in itertools.product(MOVED, SIZES.values()):
        source = values(shape, dtype)
        mine = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        theirs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        dist.all_gather(mine, source)
        dist.all_gather(theirs, source, group=gloo)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
        if shape != (0,):
            whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(whole, source)
            same(whole, torch.cat(theirs))
            stacked = torch.empty((size, *shape), dtype=dtype)
            dist.all_gather_into_tensor(stacked, source)
            same(stacked, torch.stack(theirs))


@check
def all_gather_of_different_sizes(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = [torch.empty(each + 1) for each in range(size)]
    dist.all_gather(mine, torch.full((rank + 1,), float(rank)))
    for each, tensor in enumerate(mine):
        same(tensor, torch.full((each + 1,), float(each)))


@check
def reduce_scatter_of_different_sizes(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    sources = [torch.full((each + 1,), float(rank + each)) for each in range(size)]
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, sources)
    same(mine, torch.full((rank + 1,), float(sum(range(size)) + size * rank)))
    same(sources[0], torch.full((1,), float(rank)))


@check
def all_to_all(gloo):
    size = dist.get_world_size()
    for dtype in MOVED:
        source = values((size * 3, 2), dtype)
        mine, theirs = torch.empty_like(source), torch.empty_like(source)
        dist.all_to_all_single(mine, source)
        dist.all_to_all_single(theirs, source, group=gloo)
        same(mine, theirs)


@check
def all_to_all_with_splits(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    given = [(rank + each) % 3 for each in range(size)]
    taken = [(each + rank) % 3 for each in range(size)]
    source = values((sum(given), 2), torch.float32)
    mine, theirs = torch.empty(sum(taken), 2), torch.empty(sum(taken), 2)
    dist.all_to_all_single(mine, source, taken, given)
    dist.all_to_all_single(theirs, source, taken, given, group=gloo)
    same(mine, theirs)


@check
def all_to_all_of_lists(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    sources = [torch.full((1 + (rank + each) % 2, 2), float(10 * rank + each)) for each in range(size)]
    targets = [torch.empty(1 + (each + rank) % 2, 2) for each in range(size)]
    dist.all_to_all(targets, sources)
    for each, target in enumerate(targets):
        same(target, torch.full(target.shape, float(10 * each + rank)))


@check
def gather_and_scatter(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    for root, dtype in itertools.product(range(size), (torch.float32, torch.bool, torch.int64)):
        source = values((3, 2), dtype, seed=root)
        gathered = [torch.empty(3, 2, dtype=dtype) for _ in range(size)] if rank == root else None
        theirs = [torch.empty(3, 2, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(source, gathered, dst=root)
        dist.gather(source, theirs, dst=root, group=gloo)
        for one, other in zip(gathered or [], theirs or [], strict=True):
            same(one, other)
        back = torch.empty(3, 2, dtype=dtype)
        dist.scatter(back, gathered, src=root)
        same(back, source)


@check
def barrier_and_objects(gloo):
    dist.barrier()
    size, rank = dist.get_world_size(), dist.get_rank()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": each, "text": "x" * each} for each in range(size)]
    objects_sent = [f"from {rank}"]
    dist.broadcast_object_list(objects_sent, src=size - 1)
    assert objects_sent == [f"from {size - 1}"]


@check
def send_and_receive(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    sent, received = torch.full((5,), float(rank)), torch.empty(5)
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    same(received, torch.full((5,), float((rank - 1) % size)))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert not getattr(backend, "supports_coalescing", False)  # What torch 2.15 asks next; 2.5 does not have it.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % size, tag=3),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, tag=3),
        ]
    )
    for work in works:
        work.wait()
    if rank == 0:
        senders = {dist.recv(received) for _ in range(size - 1)}
        assert senders == set(range(1, size))
    else:
        dist.send(sent, 0)


@check
def non_contiguous_tensors(gloo):
    size = dist.get_world_size()
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:]):
        mine = values((6, 8), torch.float32)
        theirs = view(mine).contiguous()
        outside = mine.clone()
        dist.all_reduce(view(mine))
        dist.all_reduce(theirs, group=gloo)
        same(view(mine).contiguous(), theirs)
        view(outside).copy_(theirs)
        same(mine, outside)
    root = size - 1
    mine = values((4, 4), torch.int32).t()
    theirs = mine.contiguous()
    dist.broadcast(mine, root)
    dist.broadcast(theirs, root, group=gloo)
    same(mine.contiguous(), theirs)
    columns = torch.zeros(3, size)
    dist.all_gather([columns[:, each] for each in range(size)], values((6,), torch.float32)[::2])
    expected = [torch.empty(3) for _ in range(size)]
    dist.all_gather(expected, values((6,), torch.float32)[::2].contiguous(), group=gloo)
    same(columns, torch.stack(expected, 1))


@check
def parameters_and_inference_tensors(gloo):
    parameter = torch.nn.Parameter(torch.full((2, 3), float(dist.get_rank())))
    dist.broadcast(parameter, 0)
    assert parameter.requires_grad
    assert parameter.sum() == 0
    columns = torch.nn.Parameter(torch.ones(3, 4)).t()
    dist.all_reduce(columns.detach())
    with torch.inference_mode():
        tensor = torch.ones(3, 4).t()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.eq(1).all()


@check
def inference_mode_is_restored(gloo):
    for mode in (True, False):
        with torch.inference_mode(mode):
            for _ in range(4):
                tensor = torch.ones(17)
                dist.all_reduce(tensor)
                same(tensor, torch.full((17,), float(dist.get_world_size())))


@check
def destroyed_groups_leave_no_threads(gloo):
    before = threading.active_count()
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
    for thread in threading.enumerate():
        if thread.name == "ccl" and threading.active_count() > before:
            thread.join(5)
    assert threading.active_count() <= before + 1  # The thread of the default group remains.


@check
def work_and_future(gloo):
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    size = dist.get_world_size()
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    same(future.wait(), torch.full((4,), 2.0 * size * size))
    many = [torch.full((50,), float(each)) for each in range(30)]
    for work in [dist.all_reduce(each, async_op=True) for each in many]:
        work.wait()
    for each, tensor in enumerate(many):
        same(tensor, torch.full((50,), float(each * size)))


@check
def functional_collectives(gloo):
    import torch.distributed._functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    name = dist.group.WORLD
    same(functional.all_reduce(torch.ones(3), "sum", name) + 0, torch.full((3,), float(size)))
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, name)
    same(gathered + 0, torch.arange(size).repeat_interleave(2).float())
    part = functional.reduce_scatter_tensor(torch.ones(size * 2), "avg", 0, name)
    same(part + 0, torch.ones(2))


@check
def invalid_arguments_raise(gloo):
    size = dist.get_world_size()
    wrong = (
        lambda: dist.all_gather_into_tensor(torch.empty(size + 1), torch.ones(1)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(size)),
        lambda: dist.all_to_all_single(torch.empty(size * 2 + 1), torch.ones(size * 2 + 1)),
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), [3] * size, [3] * size),
        lambda: dist.all_reduce(torch.ones(1).expand(5)),
        lambda: dist.all_reduce_coalesced([torch.ones(2), torch.ones(1).expand(5)]),
        lambda: dist.all_gather_coalesced([[torch.zeros(4).double()] for _ in range(size)], [torch.ones(4)]),
        lambda: dist.all_gather_coalesced([[torch.zeros(4).half()] for _ in range(size)], [torch.ones(4)]),
        lambda: dist.all_gather_coalesced([[torch.zeros(4)] for _ in range(size - 1)], [torch.ones(4)]),
    )
    for call in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            call()


@check
def different_calls_raise_in_all_ranks(gloo):
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = (
        lambda: dist.all_reduce(torch.ones(3 + (rank == 0))),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 0 else torch.float32)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.MIN),
        lambda: dist.broadcast(torch.ones(3), 1 if rank == 0 else 0),
        lambda: dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(1, dtype=torch.int32)),
        lambda: dist.all_to_all([torch.zeros(3 if rank == 0 else 50) for _ in range(size)], [torch.ones(50)] * size),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="do not match"):
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    same(tensor, torch.full((2,), float(size)))


@check
def groups(gloo):
    size, rank = dist.get_world_size(), dist.get_rank()
    first = dist.new_group([0, 1])
    last = dist.new_group([0, size - 1])
    everyone = dist.new_group()
    for group, members in ((first, (0, 1)), (last, (0, size - 1)), (everyone, range(size))):
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
    if rank in (0, 1):
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in (first, None, everyone)]
    else:
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in (None, everyone)]
    for work in works:
        work.wait()
    if rank in (0, 1):
        dist.destroy_process_group(first)
    again = dist.new_group([0, 1])
    if rank in (0, 1):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=again)
        assert tensor.item() == 2


@check
def no_names_in_shared_memory(gloo):
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"{os.getpid()}:")]
