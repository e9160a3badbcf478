"""Who carries out a group's collectives: the calling thread where it would only wait, else a thread beside it.

A group in its ranks' memory has a thread of its own. Groups of oneCCL share one: oneCCL 2022.1 without threads of its
own loses count of its messages when two threads call it at once. So ranks that are in several groups of oneCCL must
call them in the same order, as with NCCL.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from queue import SimpleQueue

from cpulaunch.worker.ccl.thread_setup import configure_thread, unpinned_cpus
from cpulaunch.worker.ccl.wire.errors import CclError, RanksDisagreeError
from cpulaunch.worker.ccl.work import INTERRUPTED, TORCH_KEEPS_WORKS, CclWork, DoneWork, abandoned, keep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Executor:
    """A thread that carries out works in order, and a turn that a calling thread may take instead of it.

    The thread inherits the CPUs of the one that first needs it, unless it is given some.
    """

    def __init__(self, cpus: frozenset[int] = frozenset(), *, watches: bool = False) -> None:
        """`watches` says that works may never come to an end by themselves: oneCCL's, when another rank is gone."""
        self._cpus, self._watches = cpus, watches
        self._watched: SimpleQueue[CclWork] = SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._works: deque[CclWork] = deque()
        self.turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._busy = self._hanging = 0
        self._is_closed = False

    def take_turn(self) -> bool:
        """Whether this thread may do the next work itself, as nothing is before it; then `turn` must be released."""
        return not self._works and self.turn.acquire(blocking=False)

    def take(self, work: CclWork) -> None:
        """Effect: the work is carried out after those before it.

        What hangs on the future of a work runs in the thread that did it: its own works are for that to do, at once.
        Raises: CclError in the middle of a work, where only a signal handler comes from.
        """
        self._check_not_busy()
        if self._hanging == threading.get_ident():
            work.queue.carry_out(work)
            return
        self._works.append(work)
        self._queue.put(None)
        with self._starting:  # Works come from several threads.
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_out_all, name="ccl", daemon=True)
                self._thread.start()

    def run(self, job: Callable[[], Any]) -> Any:
        """What the job returns. The turn is this thread's."""
        outer, self._busy = self._busy, threading.get_ident()
        try:
            return job()
        finally:
            self._busy = outer

    def settle(self, work: CclWork, error: BaseException | None = None) -> None:
        """Effect: as the work's `finish`, with what hangs on its future. The turn is this thread's."""
        outer, self._hanging = self._hanging, threading.get_ident()
        try:
            work.finish(error)
        finally:
            self._hanging = outer

    def _check_not_busy(self) -> None:
        if self._busy == threading.get_ident():
            raise CclError(
                "a signal handler called a collective in the middle of another\n"
                "hint: let it set a flag, and the program look at that between collectives"
            )

    def carry_out_until(self, work: CclWork, *, is_patient: bool) -> None:
        """Effect: works up to this one are done, if this thread may do them: who waits has nothing better to do.

        Not who waits no longer than a time of its own, nor for oneCCL, which cannot be interrupted. What hangs on a
        future, and waits, would wait for its own thread. Raises: CclError in the middle of a work.
        """
        self._check_not_busy()
        if self._hanging == threading.get_ident():
            self._carry_out_works(work)
        elif is_patient and not self._watches:
            self._carry_out_if_free(work)

    def _carry_out_if_free(self, work: CclWork) -> None:
        has_turn = False
        try:
            has_turn = self.turn.acquire(blocking=False)
            if has_turn:
                self._carry_out_works(work)
        finally:
            if has_turn:
                self.turn.release()

    def watch(self, work: CclWork) -> None:
        """Effect: the work's future fails in time if the work does not end: nobody may wait for the work itself."""
        if not self._watches:
            return
        self._watched.put(work)
        with self._starting:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch_all, name="ccl watch", daemon=True)
                self._watcher.start()

    def _watch_all(self) -> None:
        while True:
            work = self._watched.get()
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                work.finish(error)

    def _carry_out_all(self) -> None:
        configure_thread(self._cpus)
        while self._works or not self._is_closed:
            self._queue.get()
            if self._works:  # More than one, if an interrupt came between a work and the word that it is there.
                with self.turn:
                    self._carry_out_works()

    def _carry_out_works(self, until: CclWork | None = None) -> None:
        """Effect: works are done, all or up to one. This thread has the turn."""
        while self._works and not (until is not None and until.is_completed()):
            work = self._works.popleft()
            try:
                work.queue.carry_out(work)
            except BaseException:
                work.finish(CclError(INTERRUPTED))
                raise

    def close(self) -> None:
        """Effect: the thread ends when the works are done that were taken by now."""
        self._is_closed = True
        self._queue.put(None)


class GroupQueue:
    """A group's collectives, in order, and whether the group is still of use: `broken` is why it is not.

    `lost_peer` finds a rank that has ended; `notify_others` informs the other ranks that this one has left.
    """

    def __init__(
        self, executor: Executor, *, lost_peer: Callable[[], tuple[int, int] | None], notify_others: Callable[[], None]
    ):
        self.broken: BaseException | None = None
        self.executor, self.lost_peer = executor, lost_peer
        self._notify_others, self._process = notify_others, os.getpid()

    def _check(self) -> None:
        """Raises: CclError in a broken group or a fork."""
        if self.broken is not None:
            raise CclError(f"the group is broken: {self.broken}") from self.broken
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise CclError("this process was forked after init_process_group: it is no rank of the group")

    def submit(self, job: Callable[[], Any], seconds: float, *, has_own_time: bool = False) -> CclWork:
        """The job's work; it is carried out after those before it. Raises: CclError in a broken group or a fork."""
        self._check()
        work = CclWork(job, self, seconds, has_own_time=has_own_time)
        if not TORCH_KEEPS_WORKS:
            keep(work)
        self.executor.take(work)
        return work

    def do_now(self, job: Callable[[], Any]) -> DoneWork | None:
        """The job's work, carried out by this thread; None if others are before it. Raises: what the job raises."""
        self._check()
        has_turn = False
        try:
            has_turn = self.executor.take_turn()
            return DoneWork(self.executor.run(job)) if has_turn else None
        except BaseException as error:  # An interrupt breaks the group too: the others are in the middle of it.
            if not isinstance(error, RanksDisagreeError):
                abandoned.append((job, error))
                self.give_up(error)
            raise
        finally:
            if has_turn:
                self.executor.turn.release()

    def carry_out(self, work: CclWork) -> None:
        """Effect: the work is done, or has failed; the group breaks unless all ranks failed alike before they began."""
        if self.broken is not None:
            self.executor.settle(work, CclError(f"the group is broken: {self.broken}"))
            return
        try:
            work.run()
        finally:
            error = work.exception()
            if error is not None and not isinstance(error, RanksDisagreeError):
                self.give_up(error)
            self.executor.settle(work)

    def help_with(self, work: CclWork, *, is_patient: bool) -> None:
        """Effect: this thread does the work, if it may. Raises: CclError in a fork or in the middle of a work, and
        KeyboardInterrupt, which breaks the group.
        """
        self._check_process()
        try:
            self.executor.carry_out_until(work, is_patient=is_patient)
        except CclError:
            raise
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, why: BaseException) -> None:
        """Effect: the group is broken, here and for the others."""
        if self.broken is None:
            self.broken = why if isinstance(why, Exception) else CclError(INTERRUPTED)
            self._notify_others()


_shared: dict[int, Executor] = {}
"""Process id -> the thread that calls oneCCL: a forked child gets one of its own."""


def shared_executor() -> Executor:
    """The one thread of this process that may call oneCCL."""
    return _shared.setdefault(os.getpid(), Executor(unpinned_cpus(os.environ), watches=True))
