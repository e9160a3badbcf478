"""The Work objects that collectives return: programs wait for them, query them, and add callbacks to their futures."""

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError
from cpulaunch.worker.ccl.works.callback_order import Position, positions

POLL_SECONDS = 1.0
"""Interval at which a waiting thread checks whether the group can still finish."""
INTERRUPTED = "a collective was interrupted"
GRACE_POLLS = 3
"""Checks, after a rank has exited, before its data that may still be in transit counts as lost."""

_future_lock = threading.RLock()  # A signal handler may ask for a future too.
MAX_KEPT, _RECENT, _RECENT_BYTES = 1000, 64, 4096
_kept: dict[int, Any] = {}
"""Works that are not finished, by id: see keep_alive."""
_recent: deque[Any] = deque(maxlen=_RECENT)
"""Finished works of small tensors: see keep_alive."""
unfinished_jobs: list[Any] = []
"""Failed jobs of oneCCL and their errors. Other ranks may still write to the job's tensors, and to copies that the
error's traceback refers to, so these must never be freed."""


@cache
def _end_without_unloading() -> None:
    """Effect: the process exits without unloading libraries, whatever its exit code.

    A call that never returns is still inside one of them, and unloading it would cause a segmentation fault.
    Source: on_exit(3): the function registered last is called first, with the exit code, as _exit(2) expects it.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


TORCH_KEEPS_WORKS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


def keep_alive(work: "CclWork") -> None:
    """Effect: the work is not freed before it has finished.

    C++ code that got a work from Python (such as DDP's reducer, for uneven inputs) does not keep the Python object
    alive, without which the work has no methods: a work of a small tensor, such as the count of active ranks, is
    therefore kept a little longer. torch before 2.7 drops the works of all collectives in this way, so there the work
    is kept until it is waited for, unless there are many finished ones.
    """
    _kept[id(work)] = work
    if not TORCH_KEEPS_WORKS and len(_kept) > MAX_KEPT:
        works = list(_kept.items())  # A copy, because another thread may finish a work meanwhile.
        _kept.pop(next((key for key, each in works if each.is_completed()), -1), None)


def _release(work: "CclWork") -> None:
    """Effect: the finished work may be freed, soon if its tensors take little memory, else at once."""
    if _kept.pop(id(work), None) is None:
        return
    tensors = work._result if isinstance(work._result, list) else ()
    if all(
        isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() < _RECENT_BYTES // len(tensors)
        for each in tensors  # A view keeps all of the tensor that it is of.
    ):
        _recent.append(work)


class CclWork(Work):
    """A submitted collective."""

    def __init__(self, job: Callable[[], Any], queue: Any, seconds: float) -> None:
        """`queue` is the GroupQueue that it belongs to, of the module executor, which imports this one.

        `seconds`: how long a job that may hang may take, after the one before it; others end by themselves.
        """
        super().__init__()
        self.job: Callable[[], Any] | None = job
        self.queue, self._seconds = queue, seconds
        self._finished = threading.Lock()
        self._finished.acquire()
        self._finisher = 0
        self._error: BaseException | None = None
        self._result: Any = None
        self._done: Any = None
        self._future: Any = None
        self._has_ended = False
        self.position = Position()

    def run(self) -> None:
        """Effect: runs the collective. `wait` raises its error.

        Raises: exceptions that are not errors, such as KeyboardInterrupt, which belong to the running thread.
        """
        job, self.job = self.job, None
        try:
            self._result = self.queue.executor.run(job) if job is not None else None
        except BaseException as error:
            if self.queue.executor.may_hang and not isinstance(error, RanksDisagreeError):
                unfinished_jobs.append((job, error))
            self._error = self._with_cause(error) if isinstance(error, Exception) else CclError(INTERRUPTED)
            if not isinstance(error, Exception):
                raise

    def _with_cause(self, error: Exception) -> Exception:
        """The error, or a PeerLostError that names the lost rank: oneCCL reports only a lost connection."""
        lost = self.queue.lost_peer() if type(error) is CclError else None
        if lost is None:
            return error
        return PeerLostError(f"rank {lost[0]} of the group (process {lost[1]}) exited during a collective: {error}")

    def finish(self, error: BaseException | None = None) -> None:
        """Effect: completes the work and its future, then wakes all waiting threads. `error`: why the work failed."""
        if self.complete(error):
            self.complete_future()

    def complete(self, error: BaseException | None = None) -> bool:
        """Whether the work has a future that has still to be completed. Effect: the work is completed, maybe failed."""
        with _future_lock:
            if self._finisher:
                return False  # Finished after its timeout.
            self._error = self._error or error
            self._finisher = threading.get_ident()
            has_future = self._future is not None
        if not has_future:
            self._end()
        return has_future

    def complete_future(self) -> None:
        """Effect: completes the future, whose callbacks run in this thread, then wakes all waiting threads."""
        try:
            if self._future is not None:  # Else an interrupt came before the end of a work without one.
                self._set_future()
        finally:
            if self._future is None or self._done.done():  # Else an interrupt came before.
                self._end()

    def _end(self) -> None:
        self._has_ended = True
        self.queue.executor.unfinished.pop(self, None)
        self._finished.release()
        if TORCH_KEEPS_WORKS:
            _release(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True, when the collective has finished, and the callbacks of its future.

        Raises: its error; CclError after `timeout`, and it goes on.
        """
        if not self._has_ended:
            seconds = timeout.total_seconds()
            self.queue.executor.help_with(self, has_own_timeout=seconds > 0)
            self._await(seconds)
        _release(self)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, own_seconds: float) -> None:
        executor, polls = self.queue.executor, 0
        limit = own_seconds if own_seconds > 0 else self._seconds if executor.may_hang else math.inf
        left, finished, is_mine = limit, executor.finished, False
        if self._finisher == threading.get_ident():
            return  # This is a callback, of this work or of one before it.
        while not (self._has_ended or (is_mine := self._finished.acquire(timeout=max(0.0, min(POLL_SECONDS, left))))):
            left -= POLL_SECONDS
            may_fail = not self._finisher or (executor.may_hang and executor.running_thread)  # What a callback calls.
            if own_seconds <= 0 and (executor.finished != finished or not may_fail):
                left, finished = limit, executor.finished  # The time of earlier works and of callbacks does not count.
            why = self.queue.broken if may_fail else None
            if may_fail and why is None and (lost := self.queue.lost_peer()):
                polls += 1
                why = PeerLostError(f"rank {lost[0]} of the group (process {lost[1]}) exited during a collective")
                why = why if polls >= GRACE_POLLS else None
            if why is None and left <= 0:
                late = f"a collective did not finish within {limit:.0f} s: it timed out (the timeout is that of"
                if own_seconds > 0:
                    raise CclError(f"{late} the wait: the collective goes on)")
                why = PeerLostError(f"{late} the group or of the call)")
            if why is not None:
                self.queue.give_up(why)
                _end_without_unloading()
                raise why
        if is_mine:
            self._finished.release()  # Other threads may wait too.

    def is_completed(self) -> bool:
        """Whether the collective has finished, with or without an error."""
        return self._finisher != 0

    def is_success(self) -> bool:
        """Whether the collective has finished without an error."""
        return self._finisher != 0 and self._error is None

    def exception(self) -> Any:
        """The error of the collective; None if it has none so far."""
        return self._error

    def result(self) -> Any:
        """The tensors that the collective has written. Raises: as wait."""
        self.wait()
        return self._result

    synchronize = wait

    def get_future(self) -> Any:
        """A future of the tensors that the collective writes."""
        with _future_lock:
            first = self._future is None
            if first:
                done: Any = torch.futures.Future()
                future = done.then(self._outcome)
                positions[future] = (self.position,)
                if first := self._future is None:  # A signal handler may have asked meanwhile.
                    self._done, self._future = done, future
            is_complete = self._finisher != 0 and first
        if is_complete:
            self._set_future()
        elif first:
            self.queue.executor.watch(self)
        return self._future

    def _set_future(self) -> None:
        _release(self)
        if not self._done.done():  # It may be if an interrupt came after its callbacks.
            self._done.set_result(None)

    def _outcome(self, _: Any) -> Any:
        """The tensors. Raises: the error of the collective. DDP would take one stored by set_exception for tensors."""
        if self._error is not None:
            raise self._error
        return self._result


class DoneWork(Work):
    """A collective that had finished before its call returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True."""
        return True

    is_completed = is_success = wait

    def result(self) -> Any:
        """The tensors that the collective has written."""
        return self._result

    def get_future(self) -> Any:
        """A completed future of the tensors."""
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future
