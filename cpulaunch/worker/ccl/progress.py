"""The thread that carries out a process's collectives, so that the program computes meanwhile.

One for all groups: oneCCL 2022.1 without threads of its own loses count of its messages when two threads call it at
once. So ranks that are in several groups must call them in the same order, as with NCCL.
"""

from __future__ import annotations

import ctypes
import os
import threading
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch._C._distributed_c10d import Work

from cpulaunch.worker.ccl.errors import CclError, PeerLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

GLANCE_SECONDS = 1.0
"""How often a waiting program looks whether the group still can finish."""
GRACE_GLANCES = 3
"""How many looks at a rank that has ended it takes to give up on data that may still be on its way."""

_future_lock = threading.Lock()
_ending: list[int] = []


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
            # Jobs only move numbers: autograd must not see them, nor refuse to change a parameter in place.
            with torch.inference_mode():
                self._result = job() if job is not None else None
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the work
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
            _settling.put(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when the collective is done. Raises: what went wrong; PeerLostError if it takes longer than allowed."""
        if not self._is_finished:
            seconds = timeout.total_seconds()
            self._await(seconds if seconds > 0 else self._seconds)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float) -> None:
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
                self.lane.broken = why
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
            self.settle()
        return self._future

    def settle(self) -> None:
        """Effect: the future is done, and what the program hung on it is called."""
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)


class Settling:
    """Threads that settle futures: as many as wait for one another, because what hangs on a future may wait too.

    PowerSGD's hook reduces again, and waits for it, in what it hangs on its first reduction.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = 0
        self._works: SimpleQueue[CclWork] = SimpleQueue()

    def put(self, work: CclWork) -> None:
        """Effect: the work's future is settled soon, in another thread."""
        with self._lock:
            start = self._idle == 0
            self._idle -= 0 if start else 1
        self._works.put(work)
        if start:
            threading.Thread(target=self._settle_all, name="ccl futures", daemon=True).start()

    def _settle_all(self) -> None:
        while True:
            self._works.get().settle()
            with self._lock:
                self._idle += 1


_settling = Settling()


class Lane:
    """A group's collectives, in order, and whether the group is still of use: `broken` is why it is not."""

    def __init__(self, lost_peer: Callable[[], tuple[int, int] | None]) -> None:
        self.broken: BaseException | None = None
        self.lost_peer = lost_peer
        self._process = os.getpid()

    def submit(self, job: Callable[[], Any], seconds: float) -> CclWork:
        """The job's work; it is carried out after those before it. Raises: CclError in a broken group or a fork."""
        if self.broken is not None:
            raise CclError(f"the group is broken: {self.broken}") from self.broken
        if self._process != os.getpid():
            raise CclError("this process was forked after init_process_group: it is no rank of the group")
        work = CclWork(job, self, seconds)
        _queue().put(work)
        return work

    def carry_out(self, work: CclWork) -> None:
        """Effect: the work is done, or has failed."""
        if self.broken is not None:
            work.finish(CclError(f"the group is broken: {self.broken}"))
            return
        work.run()
        if isinstance(work.exception(), PeerLostError):
            self.broken = work.exception()


_queues: dict[int, SimpleQueue[CclWork]] = {}
"""Process id -> what its thread is to do: a forked child gets a thread of its own."""


def _queue() -> SimpleQueue[CclWork]:
    """This process's queue. Effect: the first time a thread starts, which inherits this thread's CPUs."""
    pid = os.getpid()
    if pid not in _queues:
        _queues[pid] = queue = SimpleQueue[CclWork]()
        threading.Thread(target=_carry_out_all, args=(queue,), name="ccl", daemon=True).start()
    return _queues[pid]


def _carry_out_all(queue: SimpleQueue[CclWork]) -> None:
    while True:
        work = queue.get()
        work.lane.carry_out(work)
        del work
