"""A collective under way, or done: what torch and the program wait for, ask, and hang their own code on."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, RanksDisagreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class JobRunner(Protocol):
        """What runs a job on a thread that may run it: executor.Executor."""

        def run(self, job: Callable[[], Any]) -> Any: ...
        def watch(self, work: CclWork) -> None: ...

    class WorkQueue(Protocol):
        """The queue that a work belongs to: executor.GroupQueue, which imports this module."""

        broken: BaseException | None
        lost_peer: Callable[[], tuple[int, int] | None]

        @property
        def executor(self) -> JobRunner: ...
        def carry_out(self, work: CclWork) -> None: ...
        def help_with(self, work: CclWork, *, is_patient: bool) -> None: ...
        def give_up(self, why: BaseException) -> None: ...


POLL_SECONDS = 1.0
"""How often a waiting program looks whether the group still can finish."""
INTERRUPTED = "a collective was interrupted"
GRACE_POLLS = 3
"""How many looks at a rank that has ended it takes to give up on data that may still be on its way."""

_future_lock = threading.Lock()
_ending: list[int] = []
_KEPT_AT_MOST = 1000
_kept: dict[int, CclWork] = {}
"""Works that nobody has waited for yet, where torch needs that: see keep."""
abandoned: list[Any] = []
"""Jobs that did not come to their end, and why: other ranks may still write into their tensors, and into copies of
those that the error's traceback holds. They must not be freed."""


def _end_without_unloading() -> None:
    """Effect: when the process exits, with whatever code, libraries are not cleaned up: a call that never returns is
    still in one of them, and would end in a segmentation fault.

    Source: on_exit(3): the last to be registered is called first, with the exit code, as _exit(2) wants it.
    """
    if not _ending:
        libc = ctypes.CDLL(None)
        _ending.append(libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None))


TORCH_KEEPS_WORKS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


def keep(work: CclWork) -> None:
    """Effect: the work lives until it is waited for. torch before 2.7 lets go of it while its C++ code (DDP, functional
    collectives) still has it, and would wait forever.

    Those that nobody ever waits for are let go once there are many.
    """
    _kept[id(work)] = work
    if len(_kept) > _KEPT_AT_MOST:
        _kept.pop(next((key for key, each in _kept.items() if each.is_completed()), -1), None)


class CclWork(Work):
    """A collective under way."""

    def __init__(self, job: Callable[[], Any], queue: WorkQueue, seconds: float, *, has_own_time: bool = False) -> None:
        """`has_own_time` says that it may take no longer than the seconds, which are not the group's."""
        super().__init__()
        self.job: Callable[[], Any] | None = job
        self.queue, self._seconds, self._has_own_time = queue, seconds, has_own_time
        self._finished = threading.Lock()
        self._finished.acquire()
        self._is_finished = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._settled: Any = None
        self._future: Any = None

    def run(self) -> None:
        """Effect: the collective is carried out; whatever it raises is raised where the work is waited for.

        An interrupt is raised here too: it belongs to the thread.
        """
        job, self.job = self.job, None
        try:
            self._result = self.queue.executor.run(job) if job is not None else None
        except BaseException as error:
            if not isinstance(error, RanksDisagreeError):
                abandoned.append((job, error))
            self._error = self._explained(error) if isinstance(error, Exception) else CclError(INTERRUPTED)
            if not isinstance(error, Exception):
                raise

    def _explained(self, error: Exception) -> Exception:
        """The error, or why it came about: oneCCL only says that its connection to a rank is lost."""
        lost = self.queue.lost_peer() if type(error) is CclError else None
        if lost is None:
            return error
        return PeerLostError(f"rank {lost[0]} of the group (process {lost[1]}) ended in a collective: {error}")

    def finish(self, error: BaseException | None = None) -> None:
        """Effect: whoever waits goes on; with the error, if one is given."""
        with _future_lock:
            if self._is_finished:
                return  # It came to its end after all, too late.
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
            self.queue.help_with(self, is_patient=seconds <= 0 and not self._has_own_time)
            self._await(seconds if seconds > 0 else self._seconds)
        _kept.pop(id(self), None)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float) -> None:
        left, polls = seconds, 0
        while not self._finished.acquire(timeout=max(0.0, min(POLL_SECONDS, left))):
            left -= POLL_SECONDS
            why = self.queue.broken
            if why is None and (lost := self.queue.lost_peer()):
                polls += 1
                why = PeerLostError(f"rank {lost[0]} of the group (process {lost[1]}) ended in a collective")
                why = why if polls >= GRACE_POLLS else None
            if why is None and left <= 0:
                why = PeerLostError(f"a collective was not done within {seconds:.0f} s: a rank is late, or hangs")
            if why is not None:
                self.queue.give_up(why)
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
                self._settled = torch.futures.Future()
                self._future = self._settled.then(self._outcome)
            settled = self._is_finished and first
        if settled:
            self._settle()
        elif first:
            self.queue.executor.watch(self)
        return self._future

    def _settle(self) -> None:
        """Effect: the future is done, and what the program hung on it is called, in this thread."""
        _kept.pop(id(self), None)
        self._settled.set_result(None)

    def _outcome(self, _: Any) -> Any:
        """The tensors. Raises: what went wrong; set_exception would make it a value, which DDP takes for tensors."""
        if self._error is not None:
            raise self._error
        return self._result


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
