"""The memory path, its barrier and the executor, in ranks that are threads of one process."""

import mmap
import os
import resource
import threading
from datetime import timedelta
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
from ccl_threads import KINDS, SECONDS, together
from torch.distributed import ReduceOp

from cpulaunch.worker.ccl.executor import Executor, GroupQueue
from cpulaunch.worker.ccl.group_setup import check_machine
from cpulaunch.worker.ccl.memory.native import open_path
from cpulaunch.worker.ccl.memory.path import ALIGNED_ELEMENTS, CHUNK_BYTES, MemoryPath, Peer, can_access_all
from cpulaunch.worker.ccl.memory.shared_barrier import PAYLOAD_BYTES, SharedBarrier, bytes_needed
from cpulaunch.worker.ccl.thread_setup import own_cpus, request_short_slices, thread_cpus
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.wire.reductions import describe_call, find_reduction, packed_call
from cpulaunch.worker.ccl.work import CclWork

pytestmark = pytest.mark.torch
SUM = find_reduction(ReduceOp.SUM, torch.float32)


def reduced(count, dtype=torch.float32):
    def rank_does(barrier):
        path, reduction = open_path(barrier, SECONDS), find_reduction(ReduceOp.SUM, dtype)
        tensor = torch.arange(count, dtype=dtype) * (barrier.rank + 1)
        path.all_reduce(packed_call("all_reduce", dtype, count), tensor, reduction)
        return tensor

    return rank_does


IN_A_PAYLOAD, IN_A_CHUNK = PAYLOAD_BYTES // 4, CHUNK_BYTES // 4


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "count",
    [
        0,
        1,
        ALIGNED_ELEMENTS,
        IN_A_PAYLOAD,
        IN_A_PAYLOAD + 1,
        2 * IN_A_CHUNK - 1,
        2 * IN_A_CHUNK + ALIGNED_ELEMENTS,
        7 * IN_A_CHUNK + 3,
    ],
)
def test_all_reduce(size, count, kind):
    expected = torch.arange(count, dtype=torch.float32) * sum(range(1, size + 1))
    assert all(torch.equal(result, expected) for result in together(size, reduced(count), kind=kind))


@each_kind
def test_more_ranks_than_shares(kind):
    count = IN_A_PAYLOAD + 1
    results = together(40, reduced(count, torch.int64), kind=kind)
    assert all(torch.equal(result, torch.arange(count) * 820) for result in results)


@each_kind
def test_barrier_counts_wrap_around(kind):
    def rank_does(barrier):
        path, sums = open_path(barrier, SECONDS), []
        for _ in range(6):
            tensor = torch.ones(3)
            path.all_reduce(packed_call("all_reduce", torch.float32, 3), tensor, SUM)
            sums.append(tensor.tolist())
        return sums

    assert together(3, rank_does, number=2**32 - 3, kind=kind) == [[[3.0] * 3] * 6] * 3


def test_all_to_all_with_uneven_sizes():
    table = [[2, 0, 3], [1, 4, 0], [0, 5, 70_000]]

    def rank_does(barrier):
        row = table[barrier.rank]
        source = torch.cat([torch.full((count,), 10 * barrier.rank + to) for to, count in enumerate(row)])
        target = torch.empty(sum(row[barrier.rank] for row in table), dtype=source.dtype)
        MemoryPath(barrier, SECONDS).exchange(packed_call("all_to_all", torch.int64, 0), target, source, table)
        return target.tolist()

    expected = [[10 * rank + to for rank in range(3) for _ in range(table[rank][to])] for to in range(3)]
    assert together(3, rank_does) == expected


@each_kind
def test_a_different_call_raises_in_all_ranks_and_the_next_call_succeeds(kind):
    def rank_does(barrier):
        path = open_path(barrier, SECONDS)
        name = "broadcast" if barrier.rank == 2 else "all_reduce"
        with pytest.raises(RanksDisagreeError, match="broadcast of 5 float32"):
            path.barrier(packed_call(name, torch.float32, 5))
        path.barrier(packed_call("barrier", torch.int32, 1))
        return "done"

    assert together(3, rank_does, kind=kind) == ["done"] * 3


@each_kind
def test_the_error_names_the_rank_that_left(kind):
    def rank_does(barrier):
        barrier.synchronize(bytes(16), SECONDS)
        if barrier.rank == 1:
            barrier.leave()
            return "left"
        barrier.wait(SECONDS)
        return "done"

    remaining, left = together(2, rank_does, kind=kind)
    assert left == "left"
    assert isinstance(remaining, PeerLostError)
    assert "rank 1 of the group" in str(remaining)


class Count:
    """The count of a rank that reaches the barrier and leaves just after the waiting rank has read the count twice."""

    def __init__(self, barrier):
        self.barrier, self.reads = barrier, 0

    @property
    def value(self):
        self.reads += 1
        seen = self.barrier._counts[1].value
        if self.reads == 2:
            self.barrier._counts[1].value = 1
            self.barrier.leave()
        return seen


def test_a_rank_that_arrives_and_leaves_between_two_reads_has_arrived():
    memory = mmap.mmap(-1, bytes_needed(2))
    waiting, leaving = (SharedBarrier(memory, rank=rank, size=2, describe=describe_call) for rank in (0, 1))
    waiting._spins = 0
    waiting._counts = [waiting._counts[0], Count(leaving)]
    waiting.wait(SECONDS)
    assert waiting._counts[1].reads > 2


@each_kind
def test_a_barrier_clears_only_its_own_sleeper_flag(kind):
    def rank_does(barrier):
        if barrier.rank == 1:
            for turn in (0, 1):
                barrier._sleepers[1][turn].value = 1
        barrier.wait(SECONDS)
        return [mark.value for mark in barrier._sleepers[1]] if barrier.rank == 1 else None

    assert together(2, rank_does, kind=kind)[1] == [1, 0]


def test_a_process_with_many_open_files_can_wait():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] != resource.RLIM_INFINITY and most[1] < 1200:
        pytest.skip(f"at most {most[1]} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, most[0]), most[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        assert together(2, lambda barrier: (barrier.wait(SECONDS), barrier.lost_peer())) == [(None, None)] * 2
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_leave_in_a_forked_child_has_no_effect():
    def rank_does(barrier):
        barrier.synchronize(bytes(16), SECONDS)
        if barrier.rank == 1:
            child = os.fork()
            if child == 0:
                barrier.leave()
                os._exit(0)
            os.waitpid(child, 0)
        barrier.wait(SECONDS)
        return "done"

    assert together(2, rank_does) == ["done", "done"]


@each_kind
def test_a_wait_ends_after_its_timeout(kind):
    def rank_does(barrier):
        barrier.synchronize(bytes(16), SECONDS)
        if barrier.rank == 0:
            barrier.wait(0.01)

    late, _ = together(2, rank_does, kind=kind)
    assert "did not reach this collective within 0 s" in str(late)


def test_ranks_of_one_user_may_access_each_others_memory():
    assert together(3, lambda barrier: can_access_all(barrier, SECONDS, call=bytes(16))) == [True] * 3


def test_the_error_for_inaccessible_memory_recommends_oneccl():
    target = torch.zeros(4)
    with pytest.raises(CclError, match=r"rank 1 of the group .* Bad address") as caught:
        Peer(1, os.getpid()).read(target.data_ptr(), 8, 4)
    assert "CPULAUNCH_CCL_PATH=oneccl" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, set()),
        ({"CCL_WORKER_AFFINITY": "auto", "LOCAL_RANK": "0"}, set()),
        ({"CCL_WORKER_AFFINITY": "6,7"}, set()),
        ({"CCL_WORKER_AFFINITY": "6,7", "LOCAL_RANK": "1"}, {7}),
        ({"CCL_WORKER_AFFINITY": "4,5,6,7", "CCL_WORKER_COUNT": "2", "LOCAL_RANK": "1"}, {6, 7}),
        ({"CCL_WORKER_AFFINITY": "6", "LOCAL_RANK": "3"}, set()),
        ({"CCL_WORKER_AFFINITY": "6,7", "LOCAL_RANK": "0", "CCL_LOCAL_RANK": "1"}, {7}),
    ],
)
def test_own_cpus(environ, expected):
    assert own_cpus(environ) == expected


def test_the_thread_gets_all_cpus_of_the_worker_if_openmp_pins_threads(monkeypatch):
    environ = {"CPULAUNCH_WORKER": '{"cpus":"0-3"}'}
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.delenv("GOMP_CPU_AFFINITY", raising=False)
    assert thread_cpus(environ) == frozenset()
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert thread_cpus(environ) == {0, 1, 2, 3}
    assert thread_cpus({}) == frozenset()


def test_the_thread_has_one_torch_thread_and_others_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert queue().submit(torch.get_num_threads, SECONDS).get_future().wait() == 1
        later = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_short_slices_keep_policy_and_niceness():
    def place():
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen = []

    def run():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        request_short_slices()
        seen.append(place())
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        request_short_slices()
        seen.append(place())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(os.SCHED_OTHER, 5), (os.SCHED_BATCH, 5)]


@pytest.mark.parametrize(("system", "architecture"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_the_error_on_unsupported_machines_recommends_gloo(system, architecture):
    with pytest.raises(CclError, match="the ccl backend supports x86-64 Linux only") as caught:
        check_machine(system, architecture)
    assert "use gloo" in str(caught.value)
    check_machine("linux", "x86_64")


def queue():
    return GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: None)


def test_works_run_in_order():
    one, done, gate = queue(), [], threading.Event()
    first = one.submit(lambda: (gate.wait(SECONDS), done.append("first")), SECONDS)
    assert one.do_now(lambda: done.append("at once")) is None
    second = one.submit(lambda: done.append("second"), SECONDS)
    gate.set()
    assert second.wait()
    assert first.is_completed()
    assert one.do_now(lambda: done.append("at once")).wait()
    assert done == ["first", "second", "at once"]


def test_a_callback_of_a_future_may_wait_for_works():
    one, done, gate = queue(), [], threading.Event()
    first = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    later = one.submit(lambda: done.append("later"), SECONDS)

    def callback(_):
        one.submit(lambda: done.append("callback"), SECONDS).wait()
        later.wait()
        done.append("waited")

    chained = first.get_future().then(callback)
    gate.set()
    chained.wait()
    assert done == ["callback", "later", "waited"]


def test_a_waiting_thread_runs_the_works():
    one = queue()
    one.executor._thread = threading.current_thread()  # No thread of its own, which might be faster.
    works = [one.submit(threading.get_ident, SECONDS) for _ in range(3)]
    works[1].wait()
    assert [work.is_completed() for work in works] == [True, True, False]
    assert works[2].result() == threading.get_ident()


def test_a_wait_with_a_timeout_leaves_the_work_to_the_thread():
    one = queue()
    work = one.submit(threading.get_ident, SECONDS)
    assert work.wait(timedelta(seconds=SECONDS))
    assert work.result() == one.executor._thread.ident


def test_works_that_may_hang_run_in_the_thread_only():
    one = GroupQueue(Executor(may_hang=True), lost_peer=lambda: None, notify_others=lambda: None)
    assert one.submit(threading.get_ident, SECONDS).result() == one.executor._thread.ident


def test_a_callback_in_the_waiting_thread_may_wait_for_works():
    one, done = GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: None), []
    one.executor._thread = threading.current_thread()  # No thread of its own: the waiting thread must run all works.
    first = one.submit(lambda: done.append("first"), SECONDS)
    later = one.submit(lambda: done.append("later"), SECONDS)

    def callback(_):
        one.submit(lambda: done.append("callback"), SECONDS).wait()
        later.wait()
        done.append("waited")

    chained = first.get_future().then(callback)
    first.wait()
    chained.wait()
    assert done == ["first", "callback", "later", "waited"]


def test_an_interrupted_wait_breaks_the_group_and_ends_the_work():
    notices = []
    one = GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: notices.append(True))
    one.executor._thread = threading.current_thread()

    def interrupted():
        raise KeyboardInterrupt

    work = one.submit(interrupted, SECONDS)
    later = one.submit(lambda: None, SECONDS)
    future = work.get_future()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert notices == [True]
    assert work.is_completed()
    with pytest.raises(RuntimeError):
        future.wait()
    with pytest.raises(CclError, match="the group is broken"):
        later.wait()


def test_a_forked_child_cannot_run_the_works_of_its_parent():
    one, done = queue(), []
    one.executor._thread = threading.current_thread()
    work = one.submit(lambda: done.append("done"), SECONDS)
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except CclError as error:
            os._exit(3 if "forked" in str(error) and not done else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert work.wait()
    assert done == ["done"]


def test_a_signal_handler_cannot_call_a_collective_during_another():
    one, other = queue(), queue()

    def with_handler():
        assert other.do_now(lambda: "another group's").result() == "another group's"
        assert one.do_now(lambda: None) is None
        for call in (lambda: one.submit(lambda: None, SECONDS), CclWork(lambda: None, one, SECONDS).wait):
            with pytest.raises(
                CclError, match="a signal handler called a collective while another one was running"
            ) as caught:
                call()
            assert "set a flag" in str(caught.value)
        return "went on"

    assert one.do_now(with_handler).result() == "went on"
    one.executor._thread = threading.current_thread()
    assert one.submit(with_handler, SECONDS).result() == "went on"


def test_later_errors_name_the_interrupt():
    one = queue()
    one.executor._thread = threading.current_thread()

    def interrupted():
        raise KeyboardInterrupt

    work = one.submit(interrupted, SECONDS)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    with pytest.raises(CclError, match="a collective was interrupted"):
        work.wait()
    with pytest.raises(CclError, match="the group is broken: a collective was interrupted"):
        one.do_now(interrupted)


def test_an_interrupted_job_breaks_the_group_and_notifies_others():
    notices = []
    one = GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: notices.append(True))

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.do_now(interrupted)
    assert notices == [True]
    with pytest.raises(CclError, match="the group is broken"):
        one.submit(interrupted, SECONDS)


class InterruptedLock:
    """A lock whose `acquire` is interrupted before it returns."""

    def acquire(self, blocking=True):
        raise KeyboardInterrupt


def test_an_interrupt_while_acquiring_the_lock_notifies_others():
    notices = []
    one = GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: notices.append(True))
    one.executor.lock = InterruptedLock()
    with pytest.raises(KeyboardInterrupt):
        one.do_now(lambda: None)
    assert notices == [True]


def test_a_work_whose_submission_was_interrupted_runs_before_the_next():
    one, done = queue(), []
    one.executor._works.append(CclWork(lambda: done.append("first"), one, SECONDS))
    assert one.do_now(lambda: done.append("at once")) is None
    assert one.submit(lambda: done.append("second"), SECONDS).wait()
    assert done == ["first", "second"]


def test_different_calls_do_not_break_the_group():
    one = queue()

    def disagree():
        raise RanksDisagreeError("no")

    with pytest.raises(RanksDisagreeError):
        one.do_now(disagree)
    with pytest.raises(RanksDisagreeError):
        one.submit(disagree, SECONDS).wait()
    assert one.do_now(lambda: 5).result() == 5
