"""Who carries out a group's collectives: the calling thread where it would only wait, else a thread beside it.

A group in its ranks' memory has a thread of its own. Groups of oneCCL share one: oneCCL 2022.1 without threads of its
own loses count of its messages when two threads call it at once. So ranks that are in several groups of oneCCL must
call them in the same order, as with NCCL.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch._C._distributed_c10d import Work

from cpulaunch.worker.ccl.errors import CclError, PeerLostError, RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

GLANCE_SECONDS = 1.0
"""How often a waiting program looks whether the group still can finish."""
GRACE_GLANCES = 3
"""How many looks at a rank that has ended it takes to give up on data that may still be on its way."""

_future_lock = threading.Lock()
_ending: list[int] = []
_abandoned: list[Any] = []
"""Jobs that did not come to their end: other ranks may still write into their tensors, which must not be freed."""


def _end_without_unloading() -> None:
    """Effect: when the process exits, with whatever code, libraries are not cleaned up: a call that never returns is
    still in one of them, and would end in a segmentation fault.

    Source: on_exit(3): the last to be registered is called first, with the exit code, as _exit(2) wants it.
    """
    if not _ending:
        libc = ctypes.CDLL(None)
        _ending.append(libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None))


class CclWork(Work):
    """A collective under way."""

    def __init__(self, job: Callable[[], Any], lane: Lane, seconds: float) -> None:
        super().__init__()
        self.job: Callable[[], Any] | None = job
        self.lane, self._seconds = lane, seconds
        self._finished = threading.Lock()
        self._finished.acquire()
        self._is_finished = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._future: Any = None

    def run(self) -> None:
        """Effect: the collective is carried out; whatever it raises is raised where the work is waited for."""
        job, self.job = self.job, None
        try:
            self._result = job() if job is not None else None
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the work
            _abandoned.append(job)
            self._error = error
        self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        """Effect: whoever waits goes on; with the error, if one is given."""
        with _future_lock:
            self._error = self._error or error
            self._is_finished = True
            future = self._future
        self._finished.release()
        if future is not None:
            self._settle()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when the collective is done. Raises: what went wrong; PeerLostError if it takes longer than allowed."""
        if not self._is_finished:
            seconds = timeout.total_seconds()
            self._await(seconds if seconds > 0 else self._seconds)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float) -> None:
        self.lane.worker.carry_out_until(self)
        left, glances = seconds, 0
        while not self._finished.acquire(timeout=max(0.0, min(GLANCE_SECONDS, left))):
            left -= GLANCE_SECONDS
            why = self.lane.broken
            if why is None and (lost := self.lane.lost_peer()):
                glances += 1
                why = PeerLostError(f"rank {lost[0]} of the group (process {lost[1]}) ended in a collective")
                why = why if glances >= GRACE_GLANCES else None
            if why is None and left <= 0:
                why = PeerLostError(f"a collective was not done within {seconds:.0f} s: a rank is late, or hangs")
            if why is not None:
                self.lane.give_up(why)
                _end_without_unloading()
                raise why
        self._finished.release()  # Others may wait too.

    def is_completed(self) -> bool:
        """Whether the collective is over, well or not."""
        return self._is_finished

    def is_success(self) -> bool:
        """Whether the collective is over and went well."""
        return self._is_finished and self._error is None

    def exception(self) -> Any:
        """What went wrong; None if nothing did yet."""
        return self._error

    def result(self) -> Any:
        """The tensors that the collective filled. Raises: what went wrong."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        """Effect: as wait."""
        self.wait()

    def get_future(self) -> Any:
        """A future of the tensors that the collective fills."""
        with _future_lock:
            first = self._future is None
            if first:
                self._future = torch.futures.Future()
            settled = self._is_finished and first
        if settled:
            self._settle()
        return self._future

    def _settle(self) -> None:
        """Effect: the future is done, and what the program hung on it is called, in this thread."""
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)


class DoneWork(Work):
    """A collective that was carried out while the program waited for it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def result(self) -> Any:
        """The tensors that the collective filled."""
        return self._result

    def get_future(self) -> Any:
        """A future of the tensors, done."""
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Worker:
    """A thread that carries out works in order, and a turn that a calling thread may take instead of it.

    The thread inherits the CPUs of the one that first needs it, unless it has CPUs of its own.
    """

    def __init__(self, cpus: frozenset[int] = frozenset()) -> None:
        self._cpus = cpus
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._works: deque[CclWork] = deque()
        self.turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def take_turn(self) -> bool:
        """Whether this thread may do the next work itself, as nothing is before it; then `turn` must be released."""
        return not self._works and self.turn.acquire(blocking=False)

    def take(self, work: CclWork) -> None:
        """Effect: the work is carried out after those before it.

        What hangs on the future of a work runs in the thread of works: its own works are for it to do, at once.
        """
        if self._is_this_thread():
            work.lane.carry_out(work)
            return
        self._works.append(work)
        self._queue.put(None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry_out_all, name="ccl", daemon=True)
            self._thread.start()

    def carry_out_until(self, work: CclWork) -> None:
        """Effect: if this is the thread of works, those up to this one are done: nobody else would do them."""
        while self._is_this_thread() and self._works and not work.is_completed():
            self._carry_out_next()

    def _is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _carry_out_all(self) -> None:
        if self._cpus:
            with suppress(OSError):  # Not this process's to use: the program's own CPUs do.
                os.sched_setaffinity(0, self._cpus)
        while True:
            self._queue.get()
            with self.turn:
                self._carry_out_next()

    def _carry_out_next(self) -> None:
        """Effect: the first of the works is done, unless it was already."""
        if self._works:
            work = self._works.popleft()
            work.lane.carry_out(work)


class Lane:
    """A group's collectives, in order, and whether the group is still of use: `broken` is why it is not.

    `lost_peer` finds a rank that has ended; `tell` lets the others know that this one comes no more.
    """

    def __init__(self, worker: Worker, *, lost_peer: Callable[[], tuple[int, int] | None], tell: Callable[[], None]):
        self.broken: BaseException | None = None
        self.worker, self.lost_peer = worker, lost_peer
        self._tell, self._process = tell, os.getpid()

    def _check(self) -> None:
        """Raises: CclError in a broken group or a fork."""
        if self.broken is not None:
            raise CclError(f"the group is broken: {self.broken}") from self.broken
        if self._process != os.getpid():
            raise CclError("this process was forked after init_process_group: it is no rank of the group")

    def submit(self, job: Callable[[], Any], seconds: float) -> CclWork:
        """The job's work; it is carried out after those before it. Raises: CclError in a broken group or a fork."""
        self._check()
        work = CclWork(job, self, seconds)
        self.worker.take(work)
        return work

    def do_now(self, job: Callable[[], Any]) -> DoneWork | None:
        """The job's work, carried out by this thread; None if others are before it. Raises: what the job raises."""
        self._check()
        if not self.worker.take_turn():
            return None
        try:
            return DoneWork(job())
        except BaseException as error:  # An interrupt breaks the group too: the others are in the middle of it.
            _abandoned.append(job)
            if not isinstance(error, RanksDisagreeError):
                self.give_up(error)
            raise
        finally:
            self.worker.turn.release()

    def carry_out(self, work: CclWork) -> None:
        """Effect: the work is done, or has failed; the group breaks unless all ranks failed alike before they began."""
        if self.broken is not None:
            work.finish(CclError(f"the group is broken: {self.broken}"))
            return
        work.run()
        error = work.exception()
        if error is not None and not isinstance(error, RanksDisagreeError):
            self.give_up(error)

    def give_up(self, why: BaseException) -> None:
        """Effect: the group is broken, here and for the others."""
        if self.broken is None:
            self.broken = why
            self._tell()


def own_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs that the launch set apart for this rank's communication; none if it did not.

    Source: oneCCL's CCL_WORKER_AFFINITY, a list of CPUs for the workers of all local ranks, one after another.
    """
    try:
        cpus = [int(cpu) for cpu in environ.get("CCL_WORKER_AFFINITY", "").split(",")]
        count, rank = int(environ.get("CCL_WORKER_COUNT", "1")), int(environ.get("LOCAL_RANK", ""))
    except ValueError:
        return frozenset()
    return frozenset(cpus[rank * count : (rank + 1) * count])


_shared: dict[int, Worker] = {}
"""Process id -> the thread that calls oneCCL: a forked child gets one of its own."""


def shared_worker() -> Worker:
    """The one thread of this process that may call oneCCL."""
    return _shared.setdefault(os.getpid(), Worker())
