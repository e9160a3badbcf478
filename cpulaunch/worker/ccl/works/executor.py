"""Queues that run a group's collectives in order, in the calling thread or in a thread of their own.

A group on the memory path has its own thread. Groups on oneCCL share one thread per process: without worker threads of
its own, oneCCL 2022.1 mixes up its messages when two threads call it at once. Ranks that belong to several such groups
must therefore call collectives of these groups in the same order, as with NCCL.
"""

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from cpulaunch.worker.ccl.wire.errors import CclError, RanksDisagreeError
from cpulaunch.worker.ccl.works.callback_order import UNKNOWN, Place, Position, comes_later, finishing, next_place
from cpulaunch.worker.ccl.works.thread_setup import configure_thread, start_thread, unpinned_cpus
from cpulaunch.worker.ccl.works.work import INTERRUPTED, CclWork, DoneWork, keep_alive


class Executor:
    """Runs submitted works in order, in a thread of its own or in a thread that waits for one of them.

    Whichever thread runs a work holds `lock`. The executor's own thread starts with the first submission, on the given
    CPUs; if there are none, on those of the submitting thread.
    """

    def __init__(self, cpus: frozenset[int] = frozenset(), *, may_hang: bool = False) -> None:
        """`may_hang`: a work may never return, such as a call of oneCCL after another rank has exited."""
        self._cpus, self.may_hang, self._process = cpus, may_hang, os.getpid()
        self.finished = 0
        self._watched: SimpleQueue[CclWork] = SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._works: deque[CclWork] = deque()
        self._put_off: list[CclWork] = []  # Completed works whose futures are not: see finish.
        self.unfinished: dict[CclWork, None] = {}  # Works that have not ended, with their callbacks.
        self.lock: Any = threading.RLock()  # Knows its owner: see do_now.
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # A signal handler may submit works too.
        self.running_thread = self._callback_thread = 0  # The threads that run a job, and callbacks.
        self._is_closed = False

    def submit(self, work: CclWork) -> None:
        """Effect: the work runs after all earlier ones; one that a callback submits, before those submitted later.

        Raises: CclError if this thread is running a work, which means that a signal handler has called a collective;
        RuntimeError if the executor's thread cannot start.
        """
        self._check_not_running()
        with self._starting:  # Several threads may submit works.
            if self._thread is None:
                self._thread = start_thread("ccl", self._run_all)
                _started.add(self)
        place, at = next_place(), sys.maxsize
        work.position.place = place
        keep_alive(work)
        if self._callback_thread == threading.get_ident():
            # This thread holds `lock`: others only append works, and these not always in order.
            at = 0
            while at < len(self._works) and self._works[at].position.place <= place:
                at += 1
        self.unfinished[work] = None  # Python handles signals after calls, so not before the work is queued.
        self._works.insert(at, work)
        self._queue.put(None)

    def run(self, job: Callable[[], Any]) -> Any:
        """The result of the job, run by the calling thread, which holds `lock`."""
        outer, self.running_thread = self.running_thread, threading.get_ident()
        try:
            return job()
        finally:
            self.running_thread = outer

    def finish(self, work: CclWork, error: BaseException | None = None) -> None:
        """Effect: completes the work, and its future, whose callbacks this thread runs. It holds `lock`.

        The future of a work that runs within a callback is completed after that callback, if its own callbacks come
        later: they might wait for what other ranks call after what the callback has still to call.
        """
        self.finished += 1
        if work.complete(error):
            if self._callback_thread and comes_later(work.position):
                self._put_off.append(work)
            else:
                self._complete_future(work)

    def _complete_future(self, work: CclWork) -> None:
        """Effect: callbacks run in torch's default modes, whatever those of this thread, as they do with gloo."""
        outer = self._callback_thread
        autocasts = torch.is_autocast_enabled("cpu")  # torch.autocast would empty the cache of all threads.
        try:
            self._callback_thread = threading.get_ident()
            torch.set_autocast_enabled("cpu", False)
            with finishing(self._run_one), torch.inference_mode(mode=False):
                work.complete_future()
        finally:
            self._callback_thread = outer
            torch.set_autocast_enabled("cpu", autocasts)

    def check_process(self) -> None:
        """Raises: CclError in a process that was forked from that of the executor."""
        if self._process != os.getpid():
            raise CclError("this process was forked after init_process_group and is not a rank of the group")

    def _check_not_running(self) -> None:
        if self.running_thread == threading.get_ident():
            raise CclError(
                "a signal handler called a collective while another one was running\n"
                "hint: set a flag in the handler and check it between collectives"
            )

    def help_with(self, work: CclWork, *, has_own_timeout: bool) -> None:
        """Effect: the calling thread, which waits for the work, runs it and all earlier ones, if it may.

        It may not if its wait has a timeout of its own, if works may hang, or while another thread runs a work. The
        callback of a future always runs them, because otherwise it would wait for its own thread.
        Raises: CclError in a forked process or while this thread runs a work. An interrupt breaks the group.
        """
        self.check_process()
        self._check_not_running()
        try:
            if self._callback_thread == threading.get_ident():
                self._run_works(work)
            elif not (has_own_timeout or self.may_hang or self.lock._is_owned()):
                try:
                    if self.lock.acquire(blocking=False):
                        self._run_works(work)
                finally:
                    try:  # noqa: SIM105 - as in do_now
                        self.lock.release()
                    except RuntimeError:
                        pass
                    if self._put_off:  # After an interrupt.
                        self._queue.put(None)
        except CclError:
            raise
        except BaseException as error:
            work.queue.give_up(error)
            raise

    def watch(self, work: CclWork) -> None:
        """Effect: the work's future fails at the timeout, even if no thread waits for the work itself."""
        if not self.may_hang:
            return
        self._watched.put(work)
        with self._starting:
            self._watcher = self._watcher or start_thread("ccl watch", self._watch_all)

    def _watch_all(self) -> None:
        while True:
            work = self._watched.get()
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - raised by the future instead
                work.finish(error)
                if self._take(work):  # The thread that put the future off may hang.
                    work.complete_future()

    def _run_all(self) -> None:
        with suppress(OSError, RuntimeError):  # Works are slower then.
            configure_thread(self._cpus)
        while self._works or not self._is_closed:
            self._queue.get()
            if self._works or self._put_off:  # Several works, if an interrupt has separated one from its queue entry.
                with self.lock:
                    self._run_works()

    def _run_works(self, until: CclWork | None = None) -> None:
        """Effect: runs the queued works, up to `until` if given. The calling thread holds `lock`."""
        while True:
            while self._complete_due():
                pass
            if not self._works or (until is not None and until.is_completed()):
                return
            self._run_next()

    def _run_one(self, before: Place | None, needed: tuple[Position, ...]) -> bool:
        """Whether there was a work to run, at an earlier place or up to one that is needed. Effect: runs one.

        Otherwise completes a future that was put off, if what the callback waits for may depend on it. The calling
        thread holds `lock`.
        """
        self.check_process()
        if self._complete_due():
            return True
        is_earlier = self._works and (before is None or self._works[0].position.place < before)
        if is_earlier or any(work.position in needed for work in list(self._works)):
            self._run_next()
            return True
        if self._complete_first(lambda work: work.position in needed):
            return True
        return UNKNOWN in needed and self._complete_first(lambda _: True)

    def _complete_due(self) -> bool:
        """Whether there was a future that was put off and comes next. Effect: completes it."""
        return self._complete_first(lambda work: not (self._callback_thread and comes_later(work.position)))

    def _complete_first(self, is_chosen: Callable[[CclWork], bool]) -> bool:
        work = next(filter(is_chosen, list(self._put_off)), None)
        try:
            if work is not None and self._take(work):
                self._complete_future(work)
        except BaseException:
            self._put_off_again(work)
            raise
        return work is not None

    def _take(self, work: CclWork) -> bool:
        """Whether the work's future was put off, and this thread, not another one, is to complete it."""
        with suppress(ValueError):
            self._put_off.remove(work)
            return True
        return False

    def _run_next(self) -> None:
        """Effect: runs and finishes a work. Errors but RanksDisagreeError, which all ranks raise, break its group."""
        work = self._works[0]
        queue = work.queue
        try:
            self._works.popleft()
            if queue.broken is not None:
                self.finish(work, CclError(f"the group is broken: {queue.broken}"))
                return
            try:
                work.run()
            finally:
                error = work.exception()
                if error is not None and not isinstance(error, RanksDisagreeError):
                    queue.give_up(error)
                self.finish(work)
        except BaseException:
            work.complete(CclError(INTERRUPTED))
            self._put_off_again(work)
            raise

    def _put_off_again(self, work: CclWork | None) -> None:
        """Effect: after an interrupt before the callbacks, another thread completes the work's future."""
        if work in self.unfinished and work not in self._put_off:
            self._put_off.insert(0, work)

    def close(self) -> None:
        """Effect: the thread ends after the works submitted so far."""
        self._is_closed = True
        self._queue.put(None)

    def drain(self) -> None:
        """Effect: returns when all works and their callbacks have run or failed."""
        waited: set[CclWork] = set()
        while left := [work for work in list(self.unfinished) if work not in waited]:  # Callbacks may call more.
            waited.add(left[-1])
            with suppress(Exception):
                left[-1].wait()


_started: weakref.WeakSet[Executor] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    """Effect: a program that ends, but not by an exception, first runs the works that it has submitted."""
    if not hasattr(sys, "last_value"):
        for executor in list(_started):
            executor.drain()


class GroupQueue:
    """A group's collectives, in the order of their calls. `broken` is the error that made the group unusable, or None.

    `lost_peer` returns a rank whose process has exited; `notify_others` informs the other ranks that this one has left.
    """

    def __init__(
        self, executor: Executor, *, lost_peer: Callable[[], tuple[int, int] | None], notify_others: Callable[[], None]
    ):
        self.broken: BaseException | None = None
        self.executor, self.lost_peer = executor, lost_peer
        self._notify_others = notify_others

    def _check(self) -> None:
        """Raises: CclError if the group is broken, or in a forked process."""
        if self.broken is not None:
            raise CclError(f"the group is broken: {self.broken}") from self.broken
        self.executor.check_process()

    def submit(self, job: Callable[[], Any], seconds: float) -> CclWork:
        """The job's work, which runs after all earlier ones. Raises: CclError if the group is broken or in a fork.

        `seconds`: how long a job that may hang may take, after the one before it.
        """
        self._check()
        work = CclWork(job, self, seconds)
        self.executor.submit(work)
        return work

    def do_now(self, job: Callable[[], Any]) -> DoneWork | None:
        """The finished work of the job, run in this thread; None if earlier works are pending.

        Python handles signals after calls, so an interrupt may come before it is known whether the lock was acquired,
        and before a second call releases it. Raises: the job's error.
        """
        self._check()
        executor = self.executor
        if executor.lock._is_owned():
            return None
        try:
            is_first = executor.lock.acquire(blocking=False) and not executor._works
            return DoneWork(executor.run(job)) if is_first else None
        except BaseException as error:  # An interrupt breaks the group too: the other ranks have begun.
            if not isinstance(error, RanksDisagreeError):
                self.give_up(error)
            raise
        finally:
            try:  # noqa: SIM105 - suppress would be a call
                executor.lock.release()
            except RuntimeError:  # Another thread has it.
                pass

    def give_up(self, why: BaseException) -> None:
        """Effect: the group is broken, in this rank and in the others."""
        if self.broken is None:
            self.broken = why if isinstance(why, Exception) else CclError(INTERRUPTED)
            self._notify_others()


_shared: dict[int, Executor] = {}
"""Process id -> its executor for oneCCL; a forked child creates its own."""


def shared_executor() -> Executor:
    """The executor of all groups on oneCCL, whose thread alone calls oneCCL."""
    return _shared.setdefault(os.getpid(), Executor(unpinned_cpus(os.environ), may_hang=True))
