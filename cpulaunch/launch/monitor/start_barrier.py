"""The start barrier's launch side: who is still missing, and the pipe that holds the others back."""

from __future__ import annotations

import os

from cpulaunch.launch.process.run_directory import ARRIVALS, GATE
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.record import record

PIPE_BYTES = 1 << 16
"""All that a pipe holds, so that no worker's line is read in two parts. Source: pipe(7)."""

PATIENCE_SECONDS = 30.0
"""How long the first worker waits before somebody is told for whom."""


@record
class Waiting:
    """Who has not arrived yet, and when (seconds of the monotonic clock) those who wait ask why; None: nobody asks."""

    missing: frozenset[int]
    ask_at: float | None = None
    asked: bool = False


def arrive(state: Waiting, message: bytes, now: float) -> Waiting:
    """The state after workers wrote their indexes, one a line."""
    here = frozenset(int(line) for line in message.split() if line.isdigit())
    ask_at = state.ask_at if state.ask_at is not None or state.asked else now + PATIENCE_SECONDS
    return Waiting(missing=state.missing - here, ask_at=ask_at, asked=state.asked)


def give_up_on(state: Waiting, worker: int) -> Waiting:
    """The state after a worker ended: nobody waits for it any more."""
    return Waiting(missing=state.missing - {worker}, ask_at=state.ask_at, asked=state.asked)


def ask(state: Waiting, now: float) -> tuple[Waiting, str | None]:
    """The state, and a line about the missing if it is time for one."""
    if state.ask_at is None or now < state.ask_at:
        return state, None
    told = Waiting(missing=state.missing, asked=True)
    missing = format_cpulist(state.missing)
    return told, f"start barrier: still waiting for worker {missing} (cpulaunch.ready(), or its first forward)"


class StartBarrier:
    """The two named pipes of a run's directory. Workers pass as soon as this is closed, by whatever end."""

    def __init__(self, directory: str, workers: frozenset[int]) -> None:
        """Raises: OSError where there can be no named pipes."""
        self.state = Waiting(missing=workers)
        arrivals, gate = os.path.join(directory, ARRIVALS), os.path.join(directory, GATE)
        self.fd, self._own_end = _open_pipe(arrivals)
        end, gate_end = _open_pipe(gate)
        self._gate: int | None = gate_end
        os.close(end)

    @property
    def lifted(self) -> bool:
        """Whether nobody is held back any more."""
        return self._gate is None

    def close(self) -> None:
        """Effect: all pass, and no descriptor is left."""
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None
        os.close(self.fd)
        os.close(self._own_end)

    def serve(self, now: float) -> None:
        """Effect: who has arrived is noted, and all pass if nobody is missing."""
        try:
            message = os.read(self.fd, PIPE_BYTES)
        except BlockingIOError:
            return
        self._become(arrive(self.state, message, now))

    def ended(self, worker: int) -> None:
        """Effect: nobody waits for this worker any more."""
        self._become(give_up_on(self.state, worker))

    def ask(self, now: float) -> str | None:
        """A line about the missing if those who wait have done so for long."""
        if self.lifted:
            return None
        self.state, line = ask(self.state, now)
        return line

    @property
    def deadline(self) -> float | None:
        """When to ask."""
        return None if self.lifted else self.state.ask_at

    def _become(self, state: Waiting) -> None:
        self.state = state
        if not state.missing and self._gate is not None:
            os.close(self._gate)
            self._gate = None


def _open_pipe(path: str) -> tuple[int, int]:
    """Both ends of a new named pipe, neither of which ever blocks. A reader that holds a writer sees no end of file."""
    os.mkfifo(path, 0o600)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return read, os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
