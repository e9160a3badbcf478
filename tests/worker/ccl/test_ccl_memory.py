"""The memory path in ranks that are threads of one process."""

import ctypes
import mmap
import os
import signal
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
from ccl_threads import SECONDS, groups_of, together
from torch.distributed import ReduceOp

from cpulaunch.worker.ccl.memory.library import (
    LIBRARY,
    PIECE_BYTES,
    READ_BYTES,
    bytes_needed,
    load,
    payload_bytes,
)
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.wire.collectives import apart
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import CALL, TYPES, describe_call, find_reduction, packed_call

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path(LIBRARY).is_file(), reason="cpulaunch was installed without a C compiler"),
]
IN_A_PAYLOAD, IN_A_MEBIBYTE = payload_bytes(2) // 4, READ_BYTES // 4
BARRIER = packed_call("barrier", torch.int32, 1)
REDUCERS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": torch.add,
}


def test_the_compiled_library_is_loaded():
    assert load() is not None


def all_reduced(tensor_of, operation="SUM"):
    def rank_does(path, rank):
        tensor = tensor_of(rank)
        reduction = find_reduction(getattr(ReduceOp, operation), tensor.dtype)
        path.all_reduce(tensor, reduction)
        return tensor

    return rank_does


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "count",
    [0, 1, 64, IN_A_PAYLOAD, IN_A_PAYLOAD + 1, 2 * IN_A_MEBIBYTE - 1, 2 * IN_A_MEBIBYTE + 64, 7 * IN_A_MEBIBYTE + 3],
)
def test_all_reduce(size, count):
    numbers = torch.arange(count, dtype=torch.float32) % (1 << 16)  # So that all sums are exact.
    expected = numbers * sum(range(1, size + 1))
    results = together(size, all_reduced(lambda rank: numbers * (rank + 1)))
    assert all(torch.equal(result, expected) for result in results)


def test_more_ranks_than_shares():
    results = together(40, all_reduced(lambda rank: torch.arange(IN_A_MEBIBYTE) * (rank + 1)))
    assert all(torch.equal(result, torch.arange(IN_A_MEBIBYTE) * 820) for result in results)


def values(dtype, count, rank):
    """Random values of every kind: all bits for integers; infinities, NaNs and tiny numbers among floats."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).view(torch.bool)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** (torch.arange(count) % 13 - 8)
    drawn[rank::50], drawn[rank::70], drawn[rank::90] = float("nan"), float("inf"), -float("inf")
    return drawn.to(dtype)


def bits(tensor):
    """The bytes of a tensor. NaNs, of many bit patterns, become one number; and -0.0 becomes 0.0, as both are equal."""
    if tensor.is_floating_point():
        tensor = tensor.nan_to_num(nan=12345.0) + 0
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("operation", REDUCERS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_all_reduce_equals_torchs_arithmetic_to_the_bit(dtype, operation):
    if dtype == torch.bool and operation == "AVG":
        pytest.skip("bools have no average")
    for count in (1, 33, 1000, READ_BYTES + 7):
        expected = [values(dtype, count, rank) for rank in (0, 1)]
        expected = REDUCERS[operation](*expected) if dtype != torch.bool else bool_reduced(operation, *expected)
        find_reduction(getattr(ReduceOp, operation), dtype).finish(expected, 2)
        for result in together(2, all_reduced(lambda rank, count=count: values(dtype, count, rank), operation)):
            assert torch.equal(bits(result), bits(expected)), count


def bool_reduced(operation, one, other):
    return one | other if operation in ("SUM", "MAX") else one & other


def test_every_half_is_converted_as_torch_does():
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    one = torch.ones_like(halves)
    for scale in (1.0, 3.0, 1 / 3, 2.0**-12):
        factor = (one * scale).half()
        expected = halves * factor
        results = together(2, all_reduced(lambda rank, factor=factor: (halves, factor)[rank].clone(), "PRODUCT"))
        assert torch.equal(bits(results[0]), bits(expected)), scale


@pytest.mark.parametrize("count", [7, READ_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_numbers_are_not_lost_where_a_thread_counts_them_as_zero(dtype, count):
    """Ranks got different sums, and halves below 2**-14 were lost."""
    smallest = torch.ones(count, dtype=torch.int16 if dtype.itemsize == 2 else torch.int32)

    def rank_does(path, rank):
        assert torch.set_flush_denormal(rank == 0)  # It is for this thread alone.
        return all_reduced(lambda rank: (smallest * (1 + rank)).view(dtype))(path, rank)

    for result in together(2, rank_does):
        assert torch.equal(result.view(smallest.dtype), 3 * smallest)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [100, 2 * PIECE_BYTES])
def test_reduce_and_reduce_scatter(count, size):
    root = size - 1

    def rank_does(path, rank):
        reduction = find_reduction(ReduceOp.SUM, torch.int64)
        row = torch.arange(count * size) * (rank + 1)
        part, whole = torch.empty(count, dtype=torch.int64), row.clone()
        path.run("reduce_scatter", part, row, reduction=reduction)
        path.reduce(whole, reduction, root=root)
        return part, whole, row

    total = torch.arange(count * size) * sum(range(1, size + 1))
    for rank, (part, whole, row) in enumerate(together(size, rank_does)):
        assert torch.equal(part, total[rank * count : (rank + 1) * count])
        assert torch.equal(whole, total if rank == root else row)


def test_barrier_counts_wrap_around():
    results = together(3, lambda path, rank: [path.run_call(BARRIER) for _ in range(6)], number=2**32 - 3)
    assert results == [[None] * 6] * 3


@pytest.mark.parametrize("most", [5, 70_000])
def test_all_to_all_with_uneven_sizes_and_a_rank_that_sends_nothing(most):
    table = [[2, 0, 3], [0, 0, 0], [0, 5, most]]

    def rank_does(path, rank):
        row = table[rank]
        source = torch.cat([torch.full((count,), 10 * rank + to) for to, count in enumerate(row)])
        target = torch.empty(sum(row[rank] for row in table), dtype=source.dtype)
        splits = row, [row[rank] for row in table]
        path.run_call(packed_call("all_to_all", torch.int64, 0), target, source, splits=splits)
        return target.tolist()

    expected = [[10 * rank + to for rank in range(3) for _ in range(table[rank][to])] for to in range(3)]
    assert together(3, rank_does) == expected


def test_splits_that_do_not_match_raise_in_all_ranks():
    def rank_does(path, rank):
        splits = ([1, 2], [1, 2]) if rank else ([1, 1], [1, 2])
        source = torch.zeros(sum(splits[0]))
        path.run_call(packed_call("all_to_all", torch.float32, 0), torch.zeros(3), source, splits=splits)

    for error in together(2, rank_does):
        assert isinstance(error, RanksDisagreeError)
        assert "rank 0 has 4 bytes for rank 1, which expects 4" not in str(error)
        assert "do not match" in str(error)


def test_a_different_call_raises_in_all_ranks_and_the_next_call_succeeds():
    def rank_does(path, rank):
        name = "broadcast" if rank == 2 else "all_reduce"
        with pytest.raises(RanksDisagreeError, match="broadcast of 5 float32"):
            path.run_call(packed_call(name, torch.float32, 5))
        path.run_call(BARRIER)
        return "done"

    assert together(3, rank_does) == ["done"] * 3


def test_the_error_names_the_rank_that_left():
    def rank_does(path, rank):
        path.run_call(BARRIER)
        path.leave() if rank == 1 else path.run_call(BARRIER)

    remaining, _ = together(2, rank_does)
    assert isinstance(remaining, PeerLostError)
    assert "rank 1 of the group" in str(remaining)
    assert "left the group" in str(remaining)


def test_a_rank_that_arrives_and_then_leaves_has_arrived():
    waiting, leaving = groups_of(2)
    leaving.slot(1).count = 1
    leaving.leave()
    waiting.slot(1).announcements[1][0], waiting.slot(1).announcements[1][1] = 0, 0
    waiting.run_call(bytes(16))
    with pytest.raises(PeerLostError):
        waiting.run_call(bytes(16))


def test_leave_in_a_forked_child_has_no_effect():
    group = groups_of(2)[0]
    child = os.fork()
    if child == 0:
        group.leave()
        os._exit(0)
    os.waitpid(child, 0)
    assert group.slot(0).has_left == 0


def test_a_wait_ends_after_its_timeout():
    def rank_does(path, rank):
        if rank == 0:
            path.run_call(BARRIER)

    late, _ = together(2, rank_does, seconds=0.01)
    assert "did not reach this collective within 0 s: the collective timed out" in str(late)
    assert " timeout " in str(late), "torch's own tests look for this word"


def test_a_late_rank_wakes_the_waiting_one_and_its_data_is_reduced():
    def rank_does(path, rank):
        path.native.poll_nanoseconds = 10**10
        if rank == 1:
            deadline = time.monotonic() + SECONDS
            while not path.slot(1).sleepers[1] and time.monotonic() < deadline:
                pass
            assert path.slot(1).sleepers[1], "rank 0 does not sleep before rank 1 arrives"
        return all_reduced(lambda rank: torch.full((5,), rank + 1.0))(path, rank).tolist()

    assert together(2, rank_does) == [[3.0] * 5] * 2


def test_a_rank_that_sleeps_until_the_next_barrier_is_woken_by_a_rank_that_was_stopped_at_the_last():
    """The stopped rank then cleared the flag by which the other one had asked to be woken."""
    waiting, stopped = groups_of(2)
    waiting.native.poll_nanoseconds = 10**11
    stopped.slot(1).announcements[1][:] = numbers_of(BARRIER)
    stopped.slot(1).count = stopped.native.number = stopped.native.piece = 1
    thread = threading.Thread(
        target=lambda: [waiting.run_call(BARRIER) for _ in range(2)],
        daemon=True,  # Its sleep would keep the tests from ending.
    )
    thread.start()
    deadline = time.monotonic() + SECONDS
    while waiting.slot(0).count < 2 or not any(stopped.slot(1).sleepers) or not is_asleep(thread):
        assert time.monotonic() < deadline
    stopped.slot(1).sleepers[1] = 0  # As it clears the flag of barrier 1.
    stopped.run_call(BARRIER)
    thread.join(SECONDS / 2)
    assert not thread.is_alive()


def is_asleep(thread):
    """Whether a thread that has said so, in the library, sleeps. Source: proc_pid_stat(5), state."""
    status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "S"


def numbers_of(call):
    """A packed call as the two numbers of a slot's announcement."""
    return [int.from_bytes(call[at : at + 8], "little") for at in (0, 8)]


def test_another_thread_can_abort_a_wait():
    group = groups_of(2)[0]
    group.native.poll_nanoseconds = 10**7
    threading.Timer(0.2, group.leave).start()
    with pytest.raises(CclError, match="aborted"):
        group.run_call(BARRIER)


@pytest.mark.parametrize("count", [5, IN_A_PAYLOAD + 1])
def test_a_rank_that_was_aborted_does_not_touch_its_tensor_when_the_late_one_arrives(count):
    """It reduced into the tensor, which the program used again, and published what the program had written there."""
    aborted, late = groups_of(2)
    aborted.native.poll_nanoseconds = 10**11
    tensor = torch.ones(count)

    def reduce():
        with suppress(CclError):
            all_reduced(lambda _: tensor)(aborted, 0)

    thread = threading.Thread(target=reduce)
    thread.start()
    deadline = time.monotonic() + SECONDS
    while not late.slot(1).sleepers[1] or not is_asleep(thread):
        assert time.monotonic() < deadline
    aborted.leave()
    tensor.fill_(42)
    with suppress(PeerLostError):
        all_reduced(lambda _: torch.ones(count))(late, 1)
    thread.join()
    assert aborted.slot(0).count == 1
    assert bool(tensor.eq(42).all())


def test_a_rank_that_is_late_changes_nothing_in_a_rank_that_gave_up():
    """Findings of a review: it wrote into the other's tensor and returned success."""
    count, gave_up = 1 << 20, threading.Event()

    def rank_does(path, rank):
        tensor = torch.full((count,), 1.0 + rank)
        reduction = find_reduction(ReduceOp.SUM, torch.float32)
        if rank == 1:
            gave_up.wait(SECONDS)
        try:
            path.all_reduce(tensor, reduction)
        except PeerLostError as error:
            tensor.fill_(42)
            if rank == 0:
                path.leave()
                gave_up.set()
                time.sleep(0.3)
            return str(error), bool(tensor.eq(42).all())
        return "success", True

    late, other = together(2, rank_does, seconds=0.2)
    assert "timed out" in late[0]
    assert "left the group" in other[0]
    assert late[1], "the tensor of the rank that gave up was changed"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [6, 200_000])
def test_buffers_that_share_memory(size, count):
    """As with gloo, the result is that of separate buffers, wherever the smaller one lies in the other."""

    def rank_does(path, rank):
        reduction, wrong = find_reduction(ReduceOp.SUM, torch.int64), []
        for row, shift in product(range(size), (0, 1)):
            whole = torch.arange(size * count) * (rank + 1)
            part = whole[row * count + shift : (row + 1) * count + shift][: count - shift]
            if part.numel() < count:
                whole = torch.arange(size * part.numel()) * (rank + 1)
                part = whole[1 : 1 + part.numel()]
            total = torch.arange(size * part.numel()) * sum(range(1, size + 1))
            expected = total[rank * part.numel() : (rank + 1) * part.numel()]
            path.run("reduce_scatter", part, whole, reduction=reduction)
            wrong.append(not torch.equal(part, expected))
            whole[:] = -1
            part[:] = rank
            path.run("all_gather", whole, part)
            wrong.append(not torch.equal(whole, torch.arange(size).repeat_interleave(part.numel())))
        exchanged = torch.arange(size * count) + rank
        even = [[count] * size] * 2
        path.run("all_to_all", exchanged, exchanged, splits=even)
        expected = torch.cat([torch.arange(count) + rank * count + other for other in range(size)])
        return any(wrong) or not torch.equal(exchanged, expected)

    assert together(size, rank_does) == [False] * size


def test_a_buffer_in_its_own_place_is_not_copied():
    whole = torch.zeros(30)
    assert apart(whole[10:20], whole, 1) is not None
    part = whole[10:20]
    assert apart(part, whole, 1) is part
    assert apart(part, whole, 0) is not part
    assert apart(whole, part, 1) is whole


def test_a_missing_or_foreign_library_is_ignored(tmp_path):
    assert load(str(tmp_path / "none.so")) is None
    assert load("libc.so.6") is None
    (tmp_path / "text.so").write_text("not a library")
    assert load(str(tmp_path / "text.so")) is None


SOURCE, SUM = torch.arange(3.0 * READ_BYTES), find_reduction(ReduceOp.SUM, torch.float32)
LARGE = {
    "all_reduce": lambda path, call: path.all_reduce(SOURCE.clone(), SUM),
    "reduce": lambda path, call: path.run_call(call, None, SOURCE.clone(), reduction=SUM),
    "broadcast": lambda path, call: path.run_call(call, None, SOURCE.clone()),
    "all_gather": lambda path, call: path.run_call(call, SOURCE.repeat(2), SOURCE),
    "all_to_all": lambda path, call: path.run_call(
        call, torch.empty_like(SOURCE), SOURCE, splits=([SOURCE.numel() // 2] * 2,) * 2
    ),
}


def has_announced(group, rank, name):
    """Effect: the rank has announced the first piece of a large collective, with a payload of zeros."""
    call = packed_call(name, torch.float32, SOURCE.numel(), reduced=SUM.number if name == "all_reduce" else 0)
    slot = group.slot(rank)
    slot.announcements[1][:] = numbers_of(call)
    if name == "all_to_all":
        (ctypes.c_uint64 * 4).from_address(group.native.ranks[rank].splits[1])[:] = [SOURCE.nbytes // 2] * 4
    slot.count = 1
    return call


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_that_leaves_between_two_pieces_fails_the_collective_of_the_others(name):
    late, gone = groups_of(2)
    call = has_announced(gone, 1, name)
    gone.leave()
    with pytest.raises(PeerLostError, match=r"rank 1 of the group .* left the group"):
        LARGE[name](late, call)
    assert late.slot(0).count == 2


@pytest.mark.parametrize("name", LARGE)
def test_a_rank_that_exits_between_two_pieces_fails_the_collective_of_the_others(name):
    group, other = groups_of(2)
    group.native.poll_nanoseconds = 10**6
    call = has_announced(other, 1, name)
    exited = os.fork()
    if exited == 0:
        os._exit(0)
    group.native.ranks[1].pidfd = pidfd = os.pidfd_open(exited)
    os.waitpid(exited, 0)
    with pytest.raises(PeerLostError, match="exited"):
        LARGE[name](group, call)
    os.close(pidfd)


@pytest.mark.parametrize("name", LARGE)
def test_a_piece_is_not_published_once_another_thread_has_aborted_the_group(name):
    """The program may change the tensor after the abort, even while the piece is copied."""
    aborted, other = groups_of(2)
    call = has_announced(other, 1, name)
    aborted.leave()
    with pytest.raises(CclError, match="aborted"):
        LARGE[name](aborted, call)
    assert aborted.slot(0).count == 0


def test_a_late_rank_is_lost_at_the_timeout_and_not_at_the_next_look():
    group = groups_of(2, seconds=0.05)[0]
    group.native.poll_nanoseconds = 4 * 10**9 * int(SECONDS)
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        group.run_call(BARRIER)
    assert time.monotonic() - started < 2 * SECONDS


def exited():
    """The number and a descriptor of a process that has exited."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd = os.pidfd_open(child)
    os.waitpid(child, 0)
    return child, pidfd


@pytest.mark.parametrize("how", ["exits", "leaves", "exits, and another one leaves because of it"])
def test_the_rank_that_is_lost_is_named_while_another_one_is_late(how):
    """It was noticed after the late one had come, or never, and then the late one was named."""
    group, late, lost = groups_of(3)
    group.native.poll_nanoseconds = 10**6
    if how != "leaves":
        group.native.ranks[2].process, group.native.ranks[2].pidfd = exited()
        group.processes[2] = group.native.ranks[2].process
    if how != "exits":
        (lost if how == "leaves" else late).leave()
    verb = "left" if how == "leaves" else "exited"
    with pytest.raises(PeerLostError, match=rf"rank 2 of the group \(process {group.processes[2]}\) {verb}"):
        group.run_call(BARRIER)


def test_signals_are_handled_during_a_collective_in_which_no_rank_is_late():
    tensor, handled = torch.ones(16 * IN_A_MEBIBYTE), []

    def rank_does(path, rank):
        path.native.poll_nanoseconds = 10**5
        native = path._continue
        path._continue = lambda *pointers: handled.append(rank) or native(*pointers)
        return all_reduced(lambda _: tensor.clone())(path, rank)

    for result in together(2, rank_does):
        assert torch.equal(result, 2 * tensor)
    assert set(handled) == {0, 1}


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_closed_descriptor_of_a_process_does_not_mean_that_it_has_exited(is_reused):
    """A program may close all descriptors, as daemons do, and open files with the same numbers."""
    group = groups_of(2, seconds=0.3)[0]
    group.native.poll_nanoseconds = 10**7
    pidfd = os.pidfd_open(os.getpid())
    group.native.ranks[1].pidfd = pidfd
    if is_reused:
        with open(os.devnull) as other:
            os.dup2(other.fileno(), pidfd)
    else:
        os.close(pidfd)
    with pytest.raises(PeerLostError, match="did not reach this collective"):
        group.run_call(BARRIER)
    if is_reused:
        os.close(pidfd)


@pytest.mark.parametrize("has_closed", [False, True])
def test_a_rank_without_a_descriptor_is_known_to_have_exited(has_closed):
    """Linux before 5.3 has none. Others learned of the exit at their timeout, by default after half an hour."""
    group = groups_of(2)[0]
    group.native.poll_nanoseconds = 10**6
    group.native.ranks[1].process = exited = os.fork()
    if exited == 0:
        os._exit(0)
    if has_closed:
        group.native.ranks[1].pidfd = os.pidfd_open(exited)
        os.close(group.native.ranks[1].pidfd)
    with pytest.raises(PeerLostError, match="exited before it reached"):
        group.run_call(BARRIER)
    os.waitpid(exited, 0)


def test_a_program_that_closed_all_descriptors_can_leave_its_group():
    pidfd = os.pidfd_open(os.getpid())
    memory = mmap.mmap(-1, bytes_needed(2))
    group = MemoryPath(memory, rank=0, processes=[os.getpid()] * 2, pidfds=[-1, pidfd], seconds=SECONDS)
    os.close(pidfd)
    group.close()


def test_views_that_negate_or_conjugate_what_they_show():
    """Their memory has the elements that they are views of, which other ranks would read."""

    def rank_does(path, rank):
        negative = torch._neg_view(torch.arange(5.0) + rank)
        assert negative.is_neg()
        assert negative.is_contiguous()
        path.all_reduce(negative, find_reduction(ReduceOp.SUM, torch.float32))
        gathered, conjugate = torch.empty(6, dtype=torch.complex64), torch.full((3,), 1 + 2j).conj()
        assert conjugate.is_conj()
        path.run("all_gather", gathered, conjugate)
        received = torch.full((3,), 5j).conj() if rank else conjugate
        path.broadcast(received, root=0)
        return negative.tolist(), gathered.tolist(), received.tolist()

    assert together(2, rank_does) == [([-1.0, -3.0, -5.0, -7.0, -9.0], [1 - 2j] * 6, [1 - 2j] * 3)] * 2


def test_the_exit_of_a_rank_is_noticed_by_a_program_that_is_interrupted_again_and_again():
    """A timer's signals end each sleep before its time; it was noticed at the timeout only."""
    group = groups_of(2, seconds=4 * SECONDS)[0]
    started = time.monotonic()
    exited = os.fork()
    if exited == 0:
        os._exit(0)
    group.native.ranks[1].pidfd = pidfd = os.pidfd_open(exited)
    os.waitpid(exited, 0)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(PeerLostError, match="exited before it reached"):
            group.run_call(BARRIER)
        assert time.monotonic() - started < 2 * SECONDS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        os.close(pidfd)


def test_a_signal_that_comes_before_a_sleep_is_handled_during_it():
    """Only one that ended the sleep was: a rank that waited for a lost one did not react to a SIGTERM."""
    group = groups_of(2, seconds=4 * SECONDS)[0]
    group.native.spin_nanoseconds, group.native.poll_nanoseconds = 3 * 10**8, 10**7

    def interrupt(*_):
        raise InterruptedError

    handler = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            group.run_call(BARRIER)
        assert time.monotonic() - started < 2 * SECONDS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 37, 1000, READ_BYTES // 4 + 3])
def test_tensors_at_odd_addresses(dtype, count):
    def odd(rank):
        plain = (torch.arange(count) % 50 + rank).to(dtype)
        tensor = torch.frombuffer(bytearray(count * dtype.itemsize + 1), dtype=dtype, offset=1)
        assert tensor.data_ptr() % 2 == 1
        return tensor.copy_(plain)

    expected = ((torch.arange(count) % 50) * 2 + 1).to(dtype)
    for result in together(2, all_reduced(odd)):
        assert torch.equal(result, expected)


def test_whatever_a_rank_says_it_calls_can_be_described() -> None:
    for number in range(256):
        assert " of 1 " in describe_call(CALL.pack(1, 0, number, number, number, number))
