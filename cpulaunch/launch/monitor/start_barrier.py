"""The launcher's side of the start barrier: which workers have not arrived, and the pipe that holds the others."""

from __future__ import annotations

import os

from cpulaunch.launch.process.run_directory import ARRIVALS, GATE, arrival_path
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record, replace
from cpulaunch.system.files.folders import remove_path
from cpulaunch.system.files.writing import make_pipe

PIPE_BYTES = 1 << 16
"""The capacity of a pipe, so that one read takes whole lines. Source: pipe(7)."""

NOTICE_SECONDS = 30.0
"""How long the first worker waits before a notice names the missing ones."""

CHECK_SECONDS = 10.0
"""Between two looks for files of workers that have arrived: another process may have read what they wrote."""


@record
class BarrierState:
    """The workers that have not arrived, and when to name them (monotonic seconds; None: not yet, or done)."""

    missing: frozenset[int]
    notice_at: float | None = None
    noticed: bool = False


def with_arrivals(state: BarrierState, message: bytes, now: float) -> BarrierState:
    """The state after workers have written their indexes, one a line; other lines are those of no worker."""
    lines = frozenset(message.split())
    arrived = frozenset(worker for worker in state.missing if b"%d" % worker in lines)
    notice_at = state.notice_at if state.notice_at is not None or state.noticed else now + NOTICE_SECONDS
    return replace(state, missing=state.missing - arrived, notice_at=notice_at)


def without_worker(state: BarrierState, worker: int) -> BarrierState:
    """The state after a worker has ended: the barrier no longer waits for it."""
    return replace(state, missing=state.missing - {worker})


def overdue_notice(state: BarrierState, now: float) -> tuple[BarrierState, str | None]:
    """The next state, and a line that names the missing workers if it is due."""
    if state.notice_at is None or now < state.notice_at:
        return state, None
    workers = "worker" if len(state.missing) == 1 else "workers"
    missing = f"{workers} {format_cpulist(state.missing)}"
    line = f"start barrier: still waiting for {missing} (cpulaunch.ready(), or the first forward)"
    return replace(state, notice_at=None, noticed=True), line


class StartBarrier:
    """The two named pipes in the run directory. The barrier opens for good when this is closed, even by a kill."""

    def __init__(self, directory: str, workers: frozenset[int]) -> None:
        """Raises: OSError where the directory cannot hold named pipes."""
        self.state = BarrierState(missing=workers)
        self._directory, self._path = directory, os.path.join(directory, GATE)
        self._look_at = 0.0
        self.fd, self._own_end = make_pipe(os.path.join(directory, ARRIVALS))
        end, gate_end = make_pipe(self._path)
        self._gate: int | None = gate_end
        os.close(end)

    @property
    def lifted(self) -> bool:
        """Whether workers pass without waiting."""
        return self._gate is None

    def close(self) -> None:
        """Effect: lets all workers pass and closes all descriptors."""
        self._lift()
        os.close(self.fd)
        os.close(self._own_end)

    def serve(self, now: float) -> None:
        """Effect: reads arrivals, and lets all workers pass if none is missing. Raises: LaunchError."""
        try:
            message = os.read(self.fd, PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:  # What a worker has spliced into it cannot be read, and is the first for ever.
            reason = error.strerror
            raise LaunchError("cannot read which workers are at the start barrier", source=reason) from None
        self._update(with_arrivals(self.state, message, now))

    def worker_ended(self, worker: int) -> None:
        """Effect: waits for this worker no longer."""
        self._update(without_worker(self.state, worker))

    def run_due(self, now: float) -> str | None:
        """A line that names the missing workers, once, if others have waited long. Effect: looks for their files."""
        if not self.lifted and self._look_at <= now:
            self._look_at = now + CHECK_SECONDS
            arrived = [each for each in self.state.missing if os.path.lexists(arrival_path(self._directory, each))]
            if arrived:
                self._update(with_arrivals(self.state, b"\n".join(b"%d" % each for each in arrived), now))
        if self.lifted:
            return None
        self.state, line = overdue_notice(self.state, now)
        return line

    @property
    def deadline(self) -> float | None:
        """When `run_due` has something to do (monotonic seconds); None: never."""
        return None if self.lifted else min(self._look_at, self.state.notice_at or self._look_at)

    def _update(self, state: BarrierState) -> None:
        self.state = state
        if not state.missing:
            self._lift()

    def _lift(self) -> None:
        if self._gate is None:
            return
        remove_path(self._path)  # A process that a worker left behind may keep the pipe open.
        os.close(self._gate)
        self._gate = None
