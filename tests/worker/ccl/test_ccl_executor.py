"""The executor that runs a group's collectives in order, and the set-up of its thread."""

import os
import sys
import threading
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch

from cpulaunch.worker.ccl.registration import check_machine
from cpulaunch.worker.ccl.wire.errors import CclError, RanksDisagreeError
from cpulaunch.worker.ccl.works.callback_order import watch_callbacks
from cpulaunch.worker.ccl.works.executor import Executor, GroupQueue
from cpulaunch.worker.ccl.works.thread_setup import own_cpus, request_short_slices, thread_cpus
from cpulaunch.worker.ccl.works.work import (
    MAX_KEPT,
    TORCH_KEEPS_WORKS,
    CclWork,
    _future_lock,
    _kept,
    _recent,
    unfinished_jobs,
)

pytestmark = pytest.mark.torch
SECONDS = 20.0


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


def test_many_works_may_be_pending_while_another_thread_finishes_some():
    one, gate, before = queue(), threading.Event(), sys.getswitchinterval()
    works = [one.submit(lambda: gate.wait(SECONDS), SECONDS)]
    sys.setswitchinterval(1e-6)
    try:
        works += [one.submit(lambda: None, SECONDS) for _ in range(MAX_KEPT + 500)]
        gate.set()
        works += [one.submit(lambda: None, SECONDS) for _ in range(500)]
    finally:
        sys.setswitchinterval(before)
    assert all(work.wait() for work in works)


def test_many_works_may_be_issued_without_a_look_at_each_pending_one(monkeypatch):
    if not TORCH_KEEPS_WORKS:
        pytest.skip("this torch drops works: finished ones among many are looked for")
    one, gate, looks = queue(), threading.Event(), []
    monkeypatch.setattr("cpulaunch.worker.ccl.works.work.MAX_KEPT", 10)
    monkeypatch.setattr(CclWork, "is_completed", lambda work: looks.append(work))
    works = [one.submit(lambda: gate.wait(SECONDS), SECONDS) for _ in range(100)]
    monkeypatch.undo()
    gate.set()
    assert works[-1].wait()
    assert not looks


def test_no_work_of_a_small_view_keeps_a_large_tensor():
    one, large, small = queue(), torch.zeros(1 << 20), torch.zeros(2)
    works = [one.submit(lambda tensor=tensor: [tensor], SECONDS) for tensor in (large[:2], small)]
    assert all(work.wait() for work in works)
    assert [work in _recent for work in works] == [False, True]


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
    assert done == ["later", "callback", "waited"]


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


@contextmanager
def deadline():
    """Ends the tests if a callback waits for ever: its thread holds a lock of the executor."""
    timer = threading.Timer(SECONDS, os._exit, [1])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("is_called_after", [False, True])
@pytest.mark.parametrize("kind", ["plain", "derived", "collected"])
def test_a_callback_may_wait_for_the_future_of_a_later_work(kind, is_called_after):
    watch_callbacks()
    one, done, gate, added = queue(), [], threading.Event(), []
    first = one.submit(lambda: gate.wait(SECONDS), SECONDS)

    def add_callback():
        return first.get_future().then(lambda _: (added[0].wait(), done.append("waited")))

    chained = add_callback() if is_called_after else None
    one.submit(lambda: done.append("between"), SECONDS)
    later = one.submit(lambda: done.append("later"), SECONDS).get_future()
    if kind == "derived":
        later = later.then(lambda _: None)
    added.append(torch.futures.collect_all([later]) if kind == "collected" else later)
    chained = add_callback() if chained is None else chained
    gate.set()
    with deadline():
        chained.wait()
    assert done == ["between", "later", "waited"]


def calls(one, done, names):
    """A callback that waits for its calls."""

    def callback(_):
        for name in names:
            one.submit(lambda name=name: done.append(name), SECONDS).wait()

    return callback


def two_works(*, is_finished):
    """A queue, a list for what is done, an event that lets two works end, and the works, which may have ended."""
    watch_callbacks()
    one, gate = queue(), threading.Event()
    works = [one.submit(lambda: gate.wait(SECONDS), SECONDS) for _ in range(2)]
    if is_finished:
        gate.set()
        works[-1].wait(timedelta(seconds=SECONDS))
    return one, [], gate, works


@pytest.mark.parametrize("first_to_have_one", [0, 1])
@pytest.mark.parametrize("is_finished", [False, True])
def test_callbacks_that_wait_run_one_after_another(is_finished, first_to_have_one):
    one, done, gate, works = two_works(is_finished=is_finished)
    for index in (first_to_have_one, 1 - first_to_have_one):
        works[index].get_future().then(calls(one, done, [(index, "x"), (index, "y")]))
    last = one.submit(lambda: done.append("last"), SECONDS)
    gate.set()
    with deadline():
        last.wait()
    expected = [(index, name) for index in (first_to_have_one, 1 - first_to_have_one) for name in "xy"]
    assert done == [*expected, "last"]


@pytest.mark.parametrize("is_finished", [False, True])
def test_several_callbacks_of_a_work_keep_their_places_among_those_of_others(is_finished):
    one, done, gate, works = two_works(is_finished=is_finished)
    for name, work in (("a", works[0]), ("b", works[1]), ("c", works[0])):
        work.get_future().add_done_callback(calls(one, done, [name + "1", name + "2"]))
    last = one.submit(lambda: done.append("last"), SECONDS)
    gate.set()
    with deadline():
        last.wait()
    assert done == ["a1", "a2", "b1", "b2", "c1", "c2", "last"]


def test_callbacks_of_many_works_may_wait():
    watch_callbacks()
    one, done, gate = queue(), [], threading.Event()
    works = [one.submit(lambda: gate.wait(SECONDS), SECONDS) for _ in range(200)]
    for number, work in enumerate(works):
        work.get_future().add_done_callback(calls(one, done, [number]))
    last = one.submit(lambda: None, SECONDS)
    gate.set()
    last.wait()
    assert done == list(range(200))


@pytest.mark.parametrize("kind", ["derived", "own", "collected"])
def test_a_callback_may_wait_for_what_later_callbacks_complete(kind):
    watch_callbacks()
    one, done, gate, awaited = queue(), [], threading.Event(), []
    first, second, third = (one.submit(lambda: gate.wait(SECONDS), SECONDS) for _ in range(3))

    def callback(_):
        one.submit(lambda: None, SECONDS).wait()  # Runs the others, whose callbacks come later.
        done.append(second.is_completed())
        second.wait()
        awaited[0].wait()
        done.append("waited")

    own, chained = torch.futures.Future(), first.get_future().then(callback)
    second.get_future().add_done_callback(lambda _: done.append("second"))
    derived = third.get_future().then(lambda _: (done.append("third"), own.set_result(None)))
    collected = torch.futures.collect_all([own, second.get_future()])
    awaited.append({"derived": derived, "own": own, "collected": collected}[kind])
    gate.set()
    with deadline():
        chained.wait()
        third.wait()
        second.wait()
    expected = ["third", "waited", "second"] if kind == "derived" else ["second", "third", "waited"]
    assert done == [True, *expected]


def test_a_future_that_was_put_off_does_not_wait_for_a_thread_that_hangs(monkeypatch):
    watch_callbacks()
    monkeypatch.setattr("cpulaunch.worker.ccl.works.work.POLL_SECONDS", 0.05)
    monkeypatch.setattr("cpulaunch.worker.ccl.works.work._end_without_unloading", lambda: None)
    hangs, gate, end = (threading.Event() for _ in range(3))
    one = GroupQueue(
        Executor(may_hang=True), lost_peer=lambda: (1, 1) if hangs.is_set() else None, notify_others=lambda: None
    )
    first, second = one.submit(lambda: gate.wait(SECONDS), SECONDS), one.submit(lambda: 5, SECONDS)

    def callback(_):
        one.submit(lambda: None, SECONDS).wait()  # Runs the second.
        one.submit(lambda: (hangs.set(), end.wait()), SECONDS).wait()

    chained, future = first.get_future().then(callback), second.get_future()
    gate.set()
    with deadline():
        assert future.wait() == 5
        end.set()
        chained.wait()


@pytest.mark.parametrize("interrupts", ["finishing", "torch.is_autocast_enabled"])
def test_a_future_is_completed_after_interrupts_before_its_callbacks(monkeypatch, interrupts):
    one = queue()
    one.executor._thread = threading.current_thread()  # The waiting thread must run the work.

    def interrupted(_):
        raise KeyboardInterrupt

    works = [one.submit(lambda: 5, SECONDS) for _ in range(2)]
    future = works[0].get_future()
    one.executor._queue.get()  # As the own thread does while another one runs the work.
    with monkeypatch.context() as patched:
        patched.setattr(f"cpulaunch.worker.ccl.works.executor.{interrupts}", interrupted)
        for work in works:
            with pytest.raises(KeyboardInterrupt):
                work.wait()
    threading.Thread(target=one.executor._run_all, daemon=True).start()
    with deadline():
        assert future.wait() == 5
        one.executor.drain()


def test_callbacks_run_in_the_default_modes_of_torch():
    one, seen = queue(), []
    one.executor._thread = threading.current_thread()  # The waiting thread must run the work.
    work = one.submit(lambda: None, SECONDS)

    def callback(_):
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    work.get_future().add_done_callback(callback)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        work.wait()
        assert torch.is_inference_mode_enabled()
    assert seen == [(False, True, False)]


def test_works_are_drained_with_what_a_running_callback_has_still_to_call():
    one, done, called, start, gate = queue(), [], *(threading.Event() for _ in range(3))

    def callback(_):
        one.submit(lambda: None, SECONDS).wait()
        called.set()
        gate.wait(SECONDS)
        one.submit(lambda: done.append(True), SECONDS)

    one.submit(lambda: start.wait(SECONDS), SECONDS).get_future().add_done_callback(callback)
    start.set()
    assert called.wait(SECONDS)
    threading.Timer(0.1, gate.set).start()
    one.executor.drain()
    assert done == [True]


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_callback_of_a_future_of_the_program_calls_where_the_program_completes_it(is_finished):
    watch_callbacks()
    one, done, gate, own = queue(), [], threading.Event(), torch.futures.Future()
    own.then(lambda _: one.submit(lambda: done.append("own"), SECONDS))
    work = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    if is_finished:
        gate.set()
        work.wait(timedelta(seconds=SECONDS))
    work.get_future().then(lambda _: one.submit(lambda: done.append("work"), SECONDS))
    own.set_result(None)
    last = one.submit(lambda: None, SECONDS)
    gate.set()
    last.wait()
    assert done == ["work", "own"]


def test_a_thread_that_cannot_start_may_start_later(monkeypatch):
    one, before = queue(), set(_kept)

    def fail(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            one.submit(lambda: None, SECONDS)
    assert set(_kept) <= before
    assert one.do_now(lambda: 5).result() == 5
    assert one.submit(lambda: 6, SECONDS).get_future().wait() == 6


def test_works_run_in_a_thread_that_cannot_be_configured(monkeypatch):
    def fail(_):
        raise OSError

    monkeypatch.setattr("cpulaunch.worker.ccl.works.executor.configure_thread", fail)
    assert queue().submit(lambda: 5, SECONDS).get_future().wait() == 5


def test_a_signal_handler_may_submit_works_and_ask_for_futures():
    one = queue()
    with deadline(), _future_lock, one.executor._starting:  # What the thread may hold when the signal comes.
        future = one.submit(lambda: 5, SECONDS).get_future()
    assert future.wait() == 5


def test_a_signal_handler_may_ask_for_the_future_that_it_interrupts_the_making_of():
    one, asked = queue(), []

    class Interrupted(CclWork):
        @property
        def _outcome(self):
            if not asked:
                asked.append(None)
                asked.append(self.get_future())
            return super()._outcome

    work = Interrupted(lambda: 5, one, SECONDS)
    one.executor.submit(work)
    assert work.get_future() is asked[1]
    assert asked[1].wait() == 5


class InterruptedQueue(deque):
    """A queue whose reader is interrupted."""

    def __getitem__(self, index):
        raise KeyboardInterrupt


def test_a_work_that_an_interrupt_kept_from_the_queue_is_not_awaited_at_the_end():
    one, done, gate = queue(), [], threading.Event()

    def callback(_):
        one.executor._works = InterruptedQueue(one.executor._works)
        with pytest.raises(KeyboardInterrupt):
            one.submit(lambda: None, SECONDS)
        one.executor._works = deque(one.executor._works)
        done.append("interrupted")

    one.submit(lambda: gate.wait(SECONDS), SECONDS).get_future().add_done_callback(callback)
    one.submit(lambda: None, SECONDS)
    gate.set()
    with deadline():
        one.executor.drain()
    assert done == ["interrupted"]


def test_a_child_that_a_callback_forks_cannot_run_the_works_of_its_parent():
    watch_callbacks()
    one, done, codes, gate = queue(), [], [], threading.Event()
    first = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    later = one.submit(lambda: done.append("done"), SECONDS)

    def callback(_):
        child = os.fork()
        if child == 0:
            try:
                later.get_future().wait()
            except CclError as error:
                os._exit(3 if "forked" in str(error) and not done else 4)
            finally:
                os._exit(5)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    first.get_future().add_done_callback(callback)
    gate.set()
    later.wait()
    assert (codes, done) == ([3], ["done"])


def test_works_are_drained_with_what_their_callbacks_call():
    watch_callbacks()
    one, done, left = queue(), [], iter(range(5))

    def step(_):
        if next(left, None) is not None:
            one.submit(lambda: threading.Event().wait(0.01), SECONDS).get_future().add_done_callback(step)
        else:
            done.append(True)

    one.submit(lambda: None, SECONDS).get_future().add_done_callback(step)
    one.executor.drain()
    assert done == [True]


def test_a_callback_that_waits_runs_nothing_that_comes_later():
    """In other ranks what comes later may not be called yet."""
    watch_callbacks()
    one, other, done, gates = queue(), queue(), [], [threading.Event() for _ in range(2)]
    first = one.submit(lambda: gates[0].wait(SECONDS), SECONDS)

    def callback(_):
        other.submit(lambda: gates[1].wait(SECONDS), SECONDS).get_future().wait()
        one.submit(lambda: done.append("callback"), SECONDS)

    first.get_future().add_done_callback(callback)
    later = one.submit(lambda: done.append("later"), SECONDS)
    gates[0].set()
    threading.Timer(0.1, gates[1].set).start()
    later.wait()
    assert done == ["callback", "later"]


def test_callbacks_may_call_more_in_a_chain_as_long_as_they_like():
    watch_callbacks()
    one, done, left = queue(), threading.Event(), iter(range(2000))

    def step(_):
        if next(left, None) is None:
            done.set()
        else:
            one.submit(lambda: None, SECONDS).get_future().add_done_callback(step)

    step(None)
    assert done.wait(SECONDS)


def test_callbacks_of_many_works_may_call_more():
    watch_callbacks()
    one, done, gate = queue(), [], threading.Event()
    works = [one.submit(lambda: gate.wait(SECONDS), SECONDS) for _ in range(200)]
    called = []
    for number, work in enumerate(works):

        def callback(_, number=number):
            return called.append(one.submit(lambda: done.append(number), SECONDS))

        work.get_future().add_done_callback(callback)
    gate.set()
    works[-1].wait()
    called[-1].wait()
    assert done == list(range(200))


def test_callbacks_of_one_future_call_in_the_order_in_which_they_were_added():
    watch_callbacks()
    one, done, gate = queue(), [], threading.Event()
    future = one.submit(lambda: gate.wait(SECONDS), SECONDS).get_future()
    derived = future.then(lambda _: None)
    future.add_done_callback(lambda _: one.submit(lambda: done.append("first"), SECONDS))
    derived.add_done_callback(lambda _: one.submit(lambda: done.append("second"), SECONDS))
    gate.set()
    one.submit(lambda: None, SECONDS).wait()
    assert done == ["first", "second"]


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
    assert done == ["first", "later", "callback", "waited"]


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
    """A lock whose `acquire` is interrupted before it returns, as Python handles signals after calls."""

    def __init__(self, lock):
        self.release, self._is_owned, self._lock = lock.release, lock._is_owned, lock

    def acquire(self, blocking=True):
        self._lock.acquire(blocking)
        raise KeyboardInterrupt


@pytest.mark.parametrize("call", [lambda one, _: one.do_now(int), lambda _, work: work.wait()], ids=["now", "wait"])
def test_an_interrupt_while_acquiring_the_lock_notifies_others_and_leaves_it_free(call):
    notices, gate = [], threading.Event()
    one = GroupQueue(Executor(), lost_peer=lambda: None, notify_others=lambda: notices.append(True))
    one.executor._thread = threading.current_thread()
    work, lock = one.submit(gate.wait, SECONDS), one.executor.lock
    one.executor.lock = InterruptedLock(lock)
    with pytest.raises(KeyboardInterrupt):
        call(one, work)
    assert notices == [True]
    assert not lock._is_owned()


def interrupts_once(function, *, is_before):
    """The function, whose first call is interrupted before it begins or after it has ended."""
    calls = []

    def interrupted(*arguments):
        calls.append(None)
        result = None if is_before and len(calls) == 1 else function(*arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    return interrupted


class PoppedAndInterrupted(deque):
    """A queue whose reader is interrupted once a work is no longer in it."""

    def popleft(self):
        super().popleft()
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("moment", ["popped", "completed", "before callbacks", "ended"])
def test_a_work_ends_and_its_future_is_completed_whenever_an_interrupt_comes(monkeypatch, moment, is_asked):
    one = queue()
    one.executor._thread = threading.current_thread()  # The waiting thread must run the work.
    work = one.submit(lambda: 5, SECONDS)
    future = work.get_future() if is_asked else None
    if moment == "popped":
        one.executor._works = PoppedAndInterrupted(one.executor._works)
    elif moment == "before callbacks":
        changed = interrupts_once(torch.is_autocast_enabled, is_before=False)
        monkeypatch.setattr("cpulaunch.worker.ccl.works.executor.torch.is_autocast_enabled", changed)
    else:
        name = "complete" if moment == "completed" else "_end"
        monkeypatch.setattr(work, name, interrupts_once(getattr(work, name), is_before=name == "_end"))
    if moment != "before callbacks" or is_asked:
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    one.executor._works = deque(one.executor._works)
    thread = threading.Thread(target=one.executor._run_all, daemon=True)
    thread.start()
    with deadline():
        one.executor.drain()
        assert work.is_completed()
        one.executor.close()
        thread.join()
        assert not one.executor.unfinished
        if future is not None and moment == "popped":
            with pytest.raises(RuntimeError, match="interrupted"):
                future.wait()
        elif future is not None:
            assert future.wait() == 5


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
    later = one.do_now(lambda: 5)  # None while the other thread still holds the lock.
    assert (later or one.submit(lambda: 5, SECONDS)).result() == 5


@pytest.mark.parametrize("callback_is_late", [False, True])
@pytest.mark.parametrize("is_chained", [False, True])
def test_a_works_place_does_not_depend_on_when_a_callback_submits_it(callback_is_late, is_chained):
    """Programs ask for the future, submit more, and then add a callback, which runs at once if the future is done."""
    watch_callbacks()
    one, done, gate = queue(), [], threading.Event()
    first = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    hooked = first.get_future().then(lambda _: None) if is_chained else first.get_future()
    one.submit(lambda: done.append("between"), SECONDS)
    if callback_is_late:
        gate.set()
        hooked.wait()
    chained = hooked.then(lambda _: one.submit(lambda: done.append("hook"), SECONDS).get_future().wait())
    one.submit(lambda: done.append("second"), SECONDS)
    third = one.submit(lambda: done.append("third"), SECONDS)
    gate.set()
    chained.wait()
    third.wait()
    assert done == ["between", "hook", "second", "third"]


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_callbacks_of_several_works_keep_the_order_in_which_they_were_added(finished):
    watch_callbacks()
    one, done, gates = queue(), [], [threading.Event() for _ in range(3)]
    works = [one.submit(lambda gate=gate: gate.wait(SECONDS), SECONDS) for gate in gates]
    for gate, work in list(zip(gates, works, strict=True))[:finished]:
        gate.set()
        work.wait(timedelta(seconds=SECONDS))
    called = []
    for number, work in enumerate(works):

        def callback(_, number=number):
            called.append(one.submit(lambda: done.append(number), SECONDS))

        work.get_future().then(callback)
    for gate in gates:
        gate.set()
    for work in works:
        work.wait()
    for work in called:
        work.wait()
    assert done == [0, 1, 2]


@pytest.mark.parametrize("finished", [False, True])
def test_a_callback_that_adds_one_to_another_work_calls_after_it(finished):
    watch_callbacks()
    one, done, gates = queue(), [], [threading.Event() for _ in range(2)]
    first, second = (one.submit(lambda gate=gate: gate.wait(SECONDS), SECONDS) for gate in gates)
    called = threading.Event()

    def outer(_):
        second.get_future().then(lambda _: one.submit(lambda: done.append("inner"), SECONDS))
        one.submit(lambda: done.append("outer"), SECONDS)
        called.set()

    if finished:
        for gate in gates:
            gate.set()
        second.wait(timedelta(seconds=SECONDS))
    first.get_future().then(outer)
    last = one.submit(lambda: done.append("last"), SECONDS)
    for gate in gates:
        gate.set()
    assert called.wait(SECONDS)
    last.wait()
    assert done == ["inner", "outer", "last"]


def test_a_callback_of_a_future_of_the_program_does_not_change_the_order_of_others():
    watch_callbacks()
    one, done, gates = queue(), [], [threading.Event() for _ in range(2)]
    first = one.submit(lambda: gates[0].wait(SECONDS), SECONDS)
    hooked, own = first.get_future(), torch.futures.Future()
    own.then(lambda _: one.submit(lambda: done.append("own"), SECONDS))
    hooked.then(lambda _: one.submit(lambda: done.append("first"), SECONDS))
    one.submit(lambda: (gates[1].wait(SECONDS), done.append("second")), SECONDS)
    own.set_result(None)
    last = one.submit(lambda: done.append("last"), SECONDS)
    for gate in gates:
        gate.set()
    last.wait()
    assert done == ["first", "second", "own", "last"]


def test_a_wait_is_not_ended_by_what_callbacks_take(monkeypatch):
    monkeypatch.setattr("cpulaunch.worker.ccl.works.work.POLL_SECONDS", 0.05)
    one = GroupQueue(Executor(may_hang=True), lost_peer=lambda: (1, 1), notify_others=lambda: None)
    started, gate = threading.Event(), threading.Event()
    work = one.submit(lambda: started.wait(SECONDS), 2.0)
    work.get_future().add_done_callback(lambda _: gate.wait(SECONDS))
    started.set()
    while not work.is_completed():
        threading.Event().wait(0.001)
    threading.Timer(2.5, gate.set).start()
    assert work.wait()
    assert one.broken is None


def test_callbacks_of_callbacks_keep_their_place():
    watch_callbacks()
    one, done, gate = queue(), [], threading.Event()

    def submit_twice(_):
        inner = one.submit(lambda: done.append("inner"), SECONDS)
        inner.get_future().add_done_callback(lambda _: one.submit(lambda: done.append("innermost"), SECONDS))

    first = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    first.get_future().add_done_callback(submit_twice)
    last = one.submit(lambda: done.append("last"), SECONDS)
    gate.set()
    last.wait()
    assert done == ["inner", "innermost", "last"]


def test_a_wait_that_times_out_leaves_the_group_usable():
    one, gate = queue(), threading.Event()
    work = one.submit(lambda: gate.wait(SECONDS), SECONDS)
    with pytest.raises(CclError, match=r"timed out .*the collective goes on"):
        work.wait(timedelta(seconds=0.05))
    gate.set()
    assert work.wait(timedelta(seconds=SECONDS))
    assert one.broken is None


def test_a_job_that_ends_by_itself_is_awaited_for_as_long_as_it_takes():
    one, started, gate = queue(), threading.Event(), threading.Event()
    work = one.submit(lambda: (started.set(), gate.wait(SECONDS)), 0.01)
    started.wait(SECONDS)
    threading.Timer(0.3, gate.set).start()
    assert work.wait()


def test_the_time_of_earlier_works_does_not_count(monkeypatch):
    monkeypatch.setattr("cpulaunch.worker.ccl.works.work.POLL_SECONDS", 0.3)
    one = GroupQueue(Executor(may_hang=True), lost_peer=lambda: None, notify_others=lambda: None)
    works = [one.submit(lambda: threading.Event().wait(0.8), 2.9) for _ in range(4)]
    assert works[-1].wait()


@pytest.mark.parametrize("may_hang", [False, True])
def test_only_failed_jobs_that_others_may_write_to_are_kept(may_hang):
    one = GroupQueue(Executor(may_hang=may_hang), lost_peer=lambda: None, notify_others=lambda: None)

    def fail():
        raise CclError("no")

    before = len(unfinished_jobs)
    with pytest.raises(CclError, match="no"):
        one.submit(fail, SECONDS).wait()
    assert len(unfinished_jobs) - before == may_hang
