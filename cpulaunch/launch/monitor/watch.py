"""What the supervisor watches for a report, a metric or a start barrier; a plain launch never imports this."""

from __future__ import annotations

import select

from cpulaunch.launch.monitor.sampling import Sampler
from cpulaunch.launch.monitor.start_barrier import StartBarrier
from cpulaunch.launch.monitor.worker_report import WorkerReport, read_worker_report
from cpulaunch.launch.process.run_directory import events_path
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


@record
class Observation:
    """What was seen of one worker: how long it ran, its peak memory, its own words, snapshots by process."""

    wall_seconds: float
    peak_memory_bytes: int | None = None
    report: WorkerReport = WorkerReport()
    samples: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class Watch:
    """The run's directory, seen from the supervisor."""

    def __init__(
        self, plan: LaunchPlan, directory: str, *, clock: Callable[[], float], notify: Callable[[str], None]
    ) -> None:
        """Raises: LaunchError if there can be no start barrier."""
        self._directory = directory
        self._clock = clock
        self._notify = notify
        self._start = clock()
        self._groups: dict[int, int] = {}
        self._started_at: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._peaks: dict[int, int | None] = {}
        self._sampler = Sampler(clock) if plan.launch.report is not None else None
        workers = frozenset(worker.index for worker in plan.workers)
        self._barrier = _open_barrier(directory, workers) if plan.launch.start_barrier else None

    def close(self) -> None:
        """Effect: no descriptor is left of it; who waits at the start barrier passes."""
        if self._barrier is not None:
            self._barrier.close()

    def register(self, poll: select.poll) -> None:
        """Effect: the poll object wakes up when `serve` has something to do."""
        if self._barrier is not None:
            poll.register(self._barrier.fd, select.POLLIN)

    def owns(self, fd: int) -> bool:
        """Whether this descriptor's readiness is for `serve`."""
        return self._barrier is not None and fd == self._barrier.fd

    def serve(self) -> None:
        """Effect: workers that have arrived at the start barrier are noted."""
        if self._barrier is not None:
            self._barrier.serve(self._clock())

    @property
    def deadline(self) -> float | None:
        """When `look` has something to do; None: never again."""
        sample = self._sampler.deadline if self._sampler is not None and self._groups else None
        ask = self._barrier.deadline if self._barrier is not None else None
        return min((at for at in (sample, ask) if at is not None), default=None)

    def look(self) -> None:
        """Effect: what is due by now is done."""
        if self._sampler is not None:
            self._sampler.look(self._groups)
        if self._barrier is not None and (line := self._barrier.ask(self._clock())) is not None:
            self._notify(line)

    def started(self, worker: int, pid: int) -> None:
        """Effect: the worker is watched."""
        self._groups[worker] = pid
        self._started_at[worker] = self._clock()

    def ended(self, worker: int, peak_memory_bytes: int | None) -> None:
        """Effect: the worker's own process is not watched any more, nor waited for."""
        self._groups.pop(worker, None)
        self._ended_at[worker] = self._clock()
        self._peaks[worker] = peak_memory_bytes
        if self._barrier is not None:
            self._barrier.ended(worker)

    def wall_seconds(self) -> float:
        """How long the run has taken so far."""
        return self._clock() - self._start

    def observation(self, worker: int) -> Observation:
        """What was seen of a worker that has ended."""
        return Observation(
            wall_seconds=self._ended_at[worker] - self._started_at[worker],
            peak_memory_bytes=self._peaks[worker],
            report=_read_report(events_path(self._directory, worker)),
            samples=self._sampler.snapshots.get(worker, {}) if self._sampler is not None else {},
        )


def _open_barrier(directory: str, workers: frozenset[int]) -> StartBarrier:
    try:
        return StartBarrier(directory, workers)
    except OSError as error:
        raise LaunchError(
            "no start barrier", value=directory, source=error.strerror, hint="set TMPDIR to a local directory"
        ) from None


def _read_report(path: str) -> WorkerReport:
    """What is in a worker's file of events, if it is still there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return read_worker_report(file)
    except OSError:
        return WorkerReport()
