"""The phases of a measurement: warm-up, steps, a few steps under the profiler, steps, done. Pure."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.records.torch_settings import DiagnosisRequest

WARM_UP, BEFORE, PROFILED, AFTER, DONE = "warm-up", "before", "profiled", "after", "done"
FOLLOWING = {WARM_UP: BEFORE, BEFORE: PROFILED, PROFILED: AFTER, AFTER: DONE}
LEAST_STEPS = 2
LEAST_SECONDS = 0.5
"""For the steps of one phase without the profiler: counters of the kernel advance in milliseconds."""
PROFILED_PART = 10
"""The profiler sees one part in this many of the time of the phase before it, but for one whole step."""
LEAST_DISTURBED = 3
"""Steps that the profiler sees where other threads often take the CPU: what interrupts one of them spares another."""
WARM_UP_SECONDS = 60.0
MOST_ADDED, MOST_TIMES_LONGER = 0.08, 3
"""Of all steps' time, what the profiler adds: until it is no more, steps are measured without it, but for no more than
this many times the time of a phase."""


@record
class Phase:
    """A finished phase: the seconds of its steps."""

    name: str
    steps: tuple[float, ...]


class Phases:
    """Goes from phase to phase as steps end. `name`: the current one. `is_disturbed`: others often take the CPU."""

    def __init__(self, request: DiagnosisRequest) -> None:
        self._request = request
        self.restart()

    def restart(self) -> None:
        """Effect: begins again with the warm-up."""
        self.name = WARM_UP
        self.is_disturbed = False
        self.steps: list[float] = []
        self.finished: list[Phase] = []

    def add(self, seconds: float) -> bool:
        """Whether the phase ends with this step, which took so long. Effect: then the next one begins."""
        self.steps.append(seconds)
        if not self._is_over():
            return False
        self.finished.append(Phase(name=self.name, steps=tuple(self.steps)))
        self.name = FOLLOWING[self.name]
        self.steps = []
        return True

    def _is_over(self) -> bool:
        count, seconds = len(self.steps), sum(self.steps[-1000:]) + 0.0
        if self.name == WARM_UP:
            return count >= self._request.warm_up or (count >= LEAST_STEPS and seconds >= WARM_UP_SECONDS)
        if self.name == PROFILED:
            if self.is_disturbed and count < LEAST_DISTURBED and seconds < self._request.phase_seconds:
                return False
            return seconds * PROFILED_PART >= sum(self.finished[-1].steps) or count >= self._request.steps
        wanted = max(LEAST_STEPS, self._request.steps // 2)
        has_enough = count >= wanted and (seconds >= LEAST_SECONDS or count >= 1000)
        if not has_enough and (count < LEAST_STEPS or seconds < self._request.phase_seconds):
            return False
        return self._added() <= MOST_ADDED or seconds >= MOST_TIMES_LONGER * self._request.phase_seconds

    def _added(self) -> float:
        """The share of all steps' time by which those under the profiler took longer than the others."""
        seen = next((each.steps for each in self.finished if each.name == PROFILED), ())
        if not seen:
            return 0.0
        others = [*self.steps, *(second for each in self.finished if each.name == BEFORE for second in each.steps)]
        usual = sum(others) / max(1, len(others)) * len(seen)
        return max(0.0, sum(seen) - usual) / max(1e-9, sum(seen) + sum(others))
