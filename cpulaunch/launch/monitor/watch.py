"""What the supervisor observes for a report, a metric or a start barrier. A plain launch never imports this."""

from __future__ import annotations

import select

from cpulaunch.launch.monitor.sampling import Sampler
from cpulaunch.launch.monitor.start_barrier import StartBarrier
from cpulaunch.launch.monitor.worker_report import WorkerReport, read_event_file
from cpulaunch.launch.process.run_directory import events_path
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cpulaunch.launch.process.bind import Notify


@record
class Observation:
    """What is known of one ended worker: its run time, peak memory, own report, and snapshots by pid."""

    wall_seconds: float
    peak_memory_bytes: int | None = None
    report: WorkerReport = WorkerReport()
    samples: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    memory: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By pid: bytes in memory at each sample."""


class Watch:
    """Observes the workers of one run through its run directory and /proc."""

    def __init__(self, plan: LaunchPlan, directory: str, *, clock: Callable[[], float]) -> None:
        """Raises: LaunchError if the start barrier cannot be made."""
        self._directory = directory
        self._clock = clock
        self._start = clock()
        self._groups: dict[int, int] = {}
        self._started_at: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._peaks: dict[int, int | None] = {}
        self._sampler = Sampler(clock) if plan.launch.reported else None
        self._workers = frozenset(worker.index for worker in plan.workers)
        self._barrier = _open_barrier(directory, self._workers) if plan.launch.start_barrier else None

    def close(self) -> None:
        """Effect: closes all descriptors, and lets workers at the start barrier pass."""
        if self._barrier is not None:
            self._barrier.close()

    def register(self, poll: select.poll) -> None:
        """Effect: makes the poll object return when `serve` has something to do."""
        if self._barrier is not None:
            poll.register(self._barrier.fd, select.POLLIN)

    def owns(self, fd: int) -> bool:
        """Whether `serve` handles this descriptor."""
        return self._barrier is not None and fd == self._barrier.fd

    def serve(self) -> None:
        """Effect: notes the workers that have arrived at the start barrier. Raises: LaunchError."""
        if self._barrier is not None:
            self._barrier.serve(self._clock())

    @property
    def deadline(self) -> float | None:
        """When `run_due` has something to do (monotonic seconds); None: never."""
        sample = self._sampler.deadline if self._sampler is not None and self._groups else None
        notice = self._barrier.deadline if self._barrier is not None else None
        return min((at for at in (sample, notice) if at is not None), default=None)

    def run_due(self, notify: Notify | None) -> None:
        """Effect: takes the snapshots and sends the notice that are due, and looks for workers at the barrier."""
        if self._sampler is not None:
            self._sampler.sample(self._groups)
        line = None if self._barrier is None else self._barrier.run_due(self._clock())
        if line is not None and notify is not None:
            notify(line)

    def worker_started(self, worker: int, pid: int) -> None:
        """Effect: observes this worker from now on."""
        self._groups[worker] = pid
        self._started_at[worker] = self._clock()

    def worker_ended(self, worker: int, peak_memory_bytes: int | None) -> None:
        """Effect: takes no more snapshots of this worker, and the start barrier no longer waits for it."""
        self._groups.pop(worker, None)
        self._ended_at[worker] = self._clock()
        self._peaks[worker] = peak_memory_bytes
        if self._barrier is not None:
            self._barrier.worker_ended(worker)

    def wall_seconds(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self._start

    def observation(self, worker: int) -> Observation:
        """What is known of a worker that has ended."""
        return Observation(
            wall_seconds=self._ended_at[worker] - self._started_at[worker],
            peak_memory_bytes=self._peaks[worker],
            report=read_event_file(events_path(self._directory, worker), workers=len(self._workers)),
            samples=self._sampler.snapshots.get(worker, {}) if self._sampler is not None else {},
            memory=self._sampler.sizes.get(worker, {}) if self._sampler is not None else {},
        )


def _open_barrier(directory: str, workers: frozenset[int]) -> StartBarrier:
    try:
        return StartBarrier(directory, workers)
    except OSError as error:
        raise LaunchError(
            "cannot make the start barrier",
            value=directory,
            source=error.strerror,
            hint="set TMPDIR to a local directory",
        ) from None
